"""Rotary position embedding as a table: strip it from cached keys, apply it again.

The reference that the fused kernels are checked against (arXiv 2608.03893,
section 3.3: remove the source's rotation, map, apply the target's).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class RotaryTable:
    """cos and sin for a set of positions.

    cos, sin: `[tokens, rotary_dim / 2]` float32, already multiplied by `scale`
    (the attention factor of YaRN and LongRoPE; 1 elsewhere).
    """

    cos: Tensor
    sin: Tensor
    pairing: Literal["half", "interleaved"] = "half"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.pairing not in ("half", "interleaved") or not 0 < self.scale < float("inf"):
            raise ValueError(f"no rotation: pairs of {self.pairing!r}, scale {self.scale}")

    @classmethod
    def build(
        cls,
        inverse_frequencies: Tensor,
        positions: Tensor,
        *,
        pairing: Literal["half", "interleaved"] = "half",
        scale: float = 1.0,
    ) -> RotaryTable:
        """Angles are float32 products, as in the engines: position * inverse frequency.

        inverse_frequencies: `[rotary_dim / 2]` radians a token; positions: `[tokens]` int.
        """
        angles = positions.to(torch.float32)[:, None] * inverse_frequencies.to(torch.float32)
        return cls(angles.cos() * scale, angles.sin() * scale, pairing, scale)

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cos.shape[-1]


def apply_rope(keys: Tensor, table: RotaryTable) -> Tensor:
    """Rotate content keys `[tokens, heads, head_dim]`; computed in float32 or keys' wider dtype, returned
    in keys' dtype.
    """
    return _rotate(keys, table, table.sin, 1.0)


def strip_rope(keys: Tensor, table: RotaryTable) -> Tensor:
    """Undo `apply_rope`: rotate back and divide by scale squared.

    cos and sin both carry the scale s, so turning the sign of sin alone would
    leave s^2 in the result.
    """
    return _rotate(keys, table, -table.sin, 1.0 / (table.scale * table.scale))


def _rotate(keys: Tensor, table: RotaryTable, sin: Tensor, factor: float) -> Tensor:
    width = table.rotary_dim
    rotated = keys[..., :width].to(torch.promote_types(keys.dtype, torch.float32))
    cos, sin = table.cos[:, None, :] * factor, sin[:, None, :] * factor
    if table.pairing == "half":
        first, second = rotated.chunk(2, dim=-1)
        out = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        out = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    out = out.to(keys.dtype)
    return out if width == keys.shape[-1] else torch.cat((out, keys[..., width:]), dim=-1)
