"""What gradients do in a fit: distil the closed form, or fit networks in its place."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from kvhub.fit.accumulate import Progress
from kvhub.fit.calibration import CalibrationSet
from kvhub.fit.distill.schedule import Distill
from kvhub.fit.mlp import MlpSettings
from kvhub.fit.moments import PairMoments
from kvhub.fit.score import HeldOutScore
from kvhub.fit.settings import FitSettings
from kvhub.fit.side import Side
from kvhub.fit.solve import Solved


def train(
    solved: Solved,
    moments: PairMoments,
    source: Side,
    target: Side,
    windows: CalibrationSet,
    settings: FitSettings,
    *,
    progress: Path | None,
    tell: Progress,
) -> Solved:
    """`solved` after what `settings.train` asks for. progress: a file to go on from, where that is kept."""
    if isinstance(settings.train, Distill):
        from kvhub.fit.distill.run import distil

        return distil(
            solved,
            moments,
            source,
            target,
            list(windows.fit),
            list(windows.tuning),
            settings,
            settings.train,
            progress=progress,
            tell=lambda done, total: tell("distil", done, total),
        )
    if isinstance(settings.train, MlpSettings):
        from kvhub.fit.mlp_run import fit_networks

        return fit_networks(solved, source, target, list(windows.fit), settings, settings.train, tell=tell)
    return solved


def held_out_score(solved: Solved) -> HeldOutScore:
    """What scores `solved` on held-out windows."""
    return HeldOutScore(solved.tensors, solved.layers) if solved.perceptron is None else _NetworkScore(solved)


class _NetworkScore(HeldOutScore):
    """`HeldOutScore` of networks."""

    def __init__(self, solved: Solved) -> None:
        super().__init__(solved.tensors, solved.layers)

    def _map(self, number: int, name: str, rows: Tensor) -> Tensor:
        from kvhub.fit.mlp_run import apply_networks

        return apply_networks(self._tensors, f"layers.{number}.{name}", rows)
