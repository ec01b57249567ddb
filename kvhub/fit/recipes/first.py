"""The row of the first position counts several times.

The first token draws much of every query's attention (the sink), and its key is unlike all others, but it is
one row in a window. What is wrong with it is wrong for every query.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvhub.fit.capture import Capture
from kvhub.fit.moments import PairMoments

if TYPE_CHECKING:
    from kvhub.fit.settings import FitSettings
    from kvhub.fit.side import Side

FIRST = 1
"""Positions that count as first."""
WEIGHT = 64
"""Of a sink: of 16, 64 and 1,024 the best by attention-output cosine on tuning windows of Qwen2.5-Coder."""
LOOK = 8
"""Windows that are looked at for one."""
APART = 0.5


def settled(settings: FitSettings, sides: Sequence[Side], windows: Sequence[Tensor]) -> FitSettings:
    """`settings` with the weight decided: `WEIGHT` where a model of the pair has a sink, else 1.

    The first windows of the calibration set are looked at, whose captures the fit needs in any case.
    """
    if settings.first_weight != 0:
        return settings
    sink = any(has_sink(map(side.capture, windows[:LOOK])) for side in sides)
    return replace(settings, first_weight=WEIGHT if sink else 1)


def has_sink(captures: Iterable[Capture]) -> bool:
    """Whether the keys of the first position are apart: their mean is further from that of all rows, squared,
    than half the rows' own variance, in the median layer. 1.6 and 2.3 in Qwen2.5-Coder, 0.03 where none is.

    One capture is held at a time.
    """
    layers: list[_Spread] = []
    for capture in captures:
        layers = layers or [_Spread() for _ in capture.content_keys]
        for layer, keys in zip(layers, capture.content_keys, strict=True):
            layer.add(keys.flatten(1).double())
    shares = sorted(layer.apart() for layer in layers)
    return shares[len(shares) // 2] > APART


class _Spread:
    """Sums over the rows of one layer, and over the first row of each capture."""

    def __init__(self) -> None:
        self.captures = self.rows = 0
        self.first = self.total = self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        """rows: `[tokens, features]`, float64."""
        self.captures += 1
        self.rows += len(rows)
        self.first = self.first + rows[0]
        self.total = self.total + rows.sum(0)
        self.squares = self.squares + rows.square().sum(0)

    def apart(self) -> float:
        """(squared distance of the mean first row from the mean row) / (variance of rows)."""
        mean = self.total / self.rows
        spread = (self.squares / self.rows - mean.square()).sum().clamp_min(1e-30)
        # The mean of a few rows strays from the true one by chance: that much is taken off.
        chance = spread / self.captures
        return float(((self.first / self.captures - mean).square().sum() - chance) / spread)


def add_weighted(
    moments: PairMoments, source: Capture, target: Capture, positions: range, weight: int
) -> None:
    """Add the rows of one window, those of the first positions `weight` times."""
    one, other = source.rows(positions), target.rows(positions)
    moments.add(repeated(one, positions, weight), repeated(other, positions, weight))


def extra(positions: range, weight: int) -> int:
    """How many rows `repeated` adds."""
    return (weight - 1) * sum(position < FIRST for position in positions)


def repeated(rows: tuple[Tensor, Tensor], positions: range, weight: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[rows, features]` at `positions`, those of the first positions again at the end."""
    if extra(positions, weight) == 0:
        return rows
    first = extra(positions, 2)
    keys, values = (torch.cat((r, r[:first].repeat(weight - 1, 1))) for r in rows)
    return keys, values
