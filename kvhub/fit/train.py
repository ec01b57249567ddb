"""What gradients do in a fit: distil the closed form, or fit networks in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvhub.fit.accumulate import Progress
from kvhub.fit.calibration import CalibrationSet
from kvhub.fit.checkpoint import Checkpoint
from kvhub.fit.mlp import MlpSettings
from kvhub.fit.score import HeldOutScore
from kvhub.fit.settings import FitSettings
from kvhub.fit.side import Side
from kvhub.fit.solve import Solved


def train_all(
    pairs: Sequence[tuple[Side, Side]],
    found: Sequence[Solved],
    windows: CalibrationSet,
    settings: FitSettings,
    checkpoint: Checkpoint | None,
    tell: Progress,
) -> list[Solved]:
    """What was solved for each direction, after what `settings.train` asks for; moments are not needed."""
    if settings.train is None:
        return list(found)
    trained = []
    for number, ((source, target), solved) in enumerate(zip(pairs, found, strict=True), 1):
        known = replace(settings, k=len(solved.layers[0]), support=solved.support or settings.support)
        place = checkpoint.training(number) if checkpoint else None
        trained.append(_train(solved, source, target, windows, known, place, tell))
    return trained


def _train(
    solved: Solved,
    source: Side,
    target: Side,
    windows: CalibrationSet,
    settings: FitSettings,
    progress: Path | None,
    tell: Progress,
) -> Solved:
    if isinstance(settings.train, MlpSettings):
        from kvhub.fit.mlp_run import fit_networks

        return fit_networks(solved, source, target, list(windows.fit), settings, settings.train, tell=tell)
    from kvhub.fit.distill.run import distil

    assert settings.train is not None
    return distil(
        solved,
        source,
        target,
        list(windows.fit),
        list(windows.tuning),
        settings,
        settings.train,
        progress=progress,
        tell=lambda done, total: tell("distil", done, total),
    )


def held_out_score(solved: Solved) -> HeldOutScore:
    """What scores `solved` on held-out windows."""
    if solved.perceptron is None:
        return HeldOutScore(solved.tensors, solved.layers)
    from kvhub.fit.mlp_run import apply_networks

    return HeldOutScore(solved.tensors, solved.layers, apply_networks)
