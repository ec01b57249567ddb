"""Rotate rows from one buffer into another: no temporaries, no concatenation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvhub_kernels.rotary import RotaryTable
from kvhub_kernels.workspace import Workspace


@dataclass(frozen=True)
class Turns:
    """cos and sin `[tokens, 1, rotary_dim / 2]` float32, ready to multiply, and how dimensions pair."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def at(self, span: slice) -> Turns:
        """Those of a span of tokens."""
        return Turns(self.cos[span], self.sin[span], self.interleaved)


def turns(table: RotaryTable) -> Turns:
    """The rotation of `table`."""
    return Turns(table.cos[:, None, :], table.sin[:, None, :], table.pairing == "interleaved")


def turns_back(table: RotaryTable, workspace: Workspace) -> Turns:
    """The exact inverse of the rotation of `table`, as in `strip_rope`, in buffers of `workspace`."""
    factor = 1.0 / (table.scale * table.scale)
    cos, sin = (workspace.take(name, table.cos.shape, torch.float32) for name in ("back_cos", "back_sin"))
    torch.mul(table.cos, factor, out=cos)
    torch.mul(table.sin, -factor, out=sin)
    return Turns(cos[:, None, :], sin[:, None, :], table.pairing == "interleaved")


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
