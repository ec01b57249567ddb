"""The long part of a fit: both models over every window, and their moments."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvhub.fit.behind import Behind
from kvhub.fit.calibration import CalibrationSet, row_positions
from kvhub.fit.checkpoint import Checkpoint
from kvhub.fit.moments import PairMoments
from kvhub.fit.recipes.first import extra, repeated
from kvhub.fit.settings import FitSettings
from kvhub.fit.side import Side
from kvhub.fit.workers import Rows, Workers

Progress = Callable[[str, int, int], None]
"""Called with (stage, steps done, steps in all)."""


def fill_captures(source: Side, target: Side, windows: CalibrationSet, team: Workers, tell: Progress) -> None:
    """First all captures of the source, then all of the target: never both models in memory."""
    every = [*windows.fit, *windows.tuning, *windows.held_out][team.rank :: team.size]
    for stage, side in (("source", source), ("target", target)):
        tell(stage, 0, len(every))
        side.fill(every, lambda done, stage=stage: tell(stage, done, len(every)))  # type: ignore[misc]
        side.release()
    team.wait()


def accumulate(
    moments: PairMoments,
    source: Side,
    target: Side,
    windows: list[Tensor],
    settings: FitSettings,
    *,
    team: Workers,
    checkpoint: Checkpoint | None,
    tell: Progress,
) -> None:
    """Add the rows of `windows` to `moments`, going on from `checkpoint`, and make them whole.

    With several processes the first one's moments are whole and the others' are not.
    """
    moments.share(team.rank, team.size)
    done = checkpoint.restore(moments) if checkpoint else 0
    widths = moments.key.x.numel(), moments.key.y.numel()
    tell("capture", done, len(windows))
    with Behind() as behind:
        while done < len(windows):
            turn = windows[done : done + team.size]
            positions = [row_positions(len(w), settings.stride, settings.exact_prefix) for w in turn]
            rows: Rows | None = None
            if team.rank < len(turn):
                window, chosen = turn[team.rank], positions[team.rank]
                weight = settings.first_weight
                rows = (
                    repeated(source.capture(window).rows(chosen), chosen, weight),
                    repeated(target.capture(window).rows(chosen), chosen, weight),
                )
            counts = [len(p) + extra(p, settings.first_weight) for p in positions]
            for one in team.gather(rows, counts, widths):
                behind.run(moments.add, *one)
            done += len(turn)
            if checkpoint and done < len(windows) and team.agree(checkpoint.due(done)):
                behind.wait()
                team.collect(moments)
                if team.first:
                    checkpoint.save(moments, done)
                team.wait()
            tell("capture", done, len(windows))
    moments.fold()
    team.collect(moments)
    moments.flush()


def moments_device(model_device: torch.device, needed: int) -> torch.device:
    """Where moments of `needed` bytes are kept: beside the models if they fit there, else in main memory."""
    if model_device.type == "cuda" and torch.cuda.mem_get_info(model_device)[0] > 1.2 * needed:
        return model_device
    return torch.device("cpu")
