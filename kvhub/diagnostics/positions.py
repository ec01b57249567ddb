"""Error by position: the sink and the first tokens behave unlike the rest."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BUCKETS = (0, 1, 4, 16, 64, 256, 1024, 4096)
"""First positions of the groups that a table shows: the sink, 1-3, 4-15, ..."""


class PositionErrors(NamedTuple):
    """Of one kind of rows (content keys or values) of one layer and window, float64."""

    errors: Tensor
    """`[tokens]`: |y_hat - y|^2 over heads and dimensions."""
    spread: Tensor
    """`[]`: mean over tokens of |y - mean|^2; errors / spread average to 1 - R2 of the layer."""


def position_errors(native: Tensor, mapped: Tensor) -> PositionErrors:
    """native, mapped: `[tokens, kv_heads, d]`, content keys or values."""
    y = native.double().flatten(1)
    errors = (mapped.double().flatten(1) - y).square().sum(-1)
    return PositionErrors(errors, (y - y.mean(0)).square().sum(-1).mean())


def by_bucket(errors: Tensor) -> list[tuple[str, float]]:
    """Mean of `[tokens]` errors in each group of `BUCKETS` that has a position: `("4-15", 0.21)`."""
    length = len(errors)
    found = []
    for start, stop in zip(BUCKETS, (*BUCKETS[1:], 1 << 62), strict=True):
        if start < length:
            last = min(stop, length) - 1
            name = str(start) if last == start else f"{start}-{last}"
            found.append((name, float(torch.as_tensor(errors[start:stop]).double().mean())))
    return found
