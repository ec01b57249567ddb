"""Error by position: the sink and the first tokens behave unlike the rest."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
