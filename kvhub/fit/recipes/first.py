"""Rows of the first positions count several times.

The first token draws much of every query's attention (the sink), and its key is unlike all others, but it is
one row in a window. What is wrong with it is wrong for every query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvhub.fit.capture import Capture
from kvhub.fit.moments import PairMoments

FIRST = 4
"""Positions that count as first."""


def add_weighted(
    moments: PairMoments, source: Capture, target: Capture, positions: range, weight: int
) -> None:
    """Add the rows of one window, those of the first positions `weight` times."""
    one, other = source.rows(positions), target.rows(positions)
    first = sum(position < FIRST for position in positions)
    moments.add(repeated(one, first, weight), repeated(other, first, weight))


def repeated(rows: tuple[Tensor, Tensor], first: int, weight: int) -> tuple[Tensor, Tensor]:
    """Keys and values `[rows, features]` with the first `first` rows `weight` times."""
    if first == 0 or weight == 1:
        return rows
    return _repeat(rows[0], first, weight), _repeat(rows[1], first, weight)


def _repeat(rows: Tensor, first: int, weight: int) -> Tensor:
    return torch.cat((rows, rows[:first].repeat(weight - 1, 1)))
