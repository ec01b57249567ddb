"""Rotate rows from one buffer into another: no temporaries, no concatenation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvhub_kernels.rotary import RotaryTable


@dataclass(frozen=True)
class Turns:
    """cos and sin `[tokens, 1, rotary_dim / 2]` float32, ready to multiply, and how dimensions pair."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def at(self, span: slice) -> Turns:
        """Those of a span of tokens."""
        return Turns(self.cos[span], self.sin[span], self.interleaved)


def turns(table: RotaryTable, *, back: bool = False) -> Turns:
    """The rotation of `table`; `back`: its exact inverse, as in `strip_rope`."""
    cos, sin = table.cos[:, None, :], table.sin[:, None, :]
    if back:
        factor = 1.0 / (table.scale * table.scale)
        cos, sin = cos * factor, sin * -factor
    return Turns(cos, sin, table.pairing == "interleaved")


def rotate_into(out: Tensor, rows: Tensor, by: Turns) -> Tensor:
    """`out` becomes `rows` turned; both `[tokens, heads, dim]` float32 of any strides, not overlapping."""
    half = by.cos.shape[-1]
    width = 2 * half
    if by.interleaved:
        first, second = rows[..., 0:width:2], rows[..., 1:width:2]
        to_first, to_second = out[..., 0:width:2], out[..., 1:width:2]
    else:
        first, second = rows[..., :half], rows[..., half:width]
        to_first, to_second = out[..., :half], out[..., half:width]
    torch.mul(first, by.cos, out=to_first)
    to_first.addcmul_(second, by.sin, value=-1.0)
    torch.mul(second, by.cos, out=to_second)
    to_second.addcmul_(first, by.sin)
    if width < rows.shape[-1]:
        out[..., width:].copy_(rows[..., width:])
    return out
