"""Keys through a target's own k_norm (Qwen3): every head to unit root mean square, times a weight, then RoPE.

A target with k_norm caches no other keys. A regression shortens what it maps, the more the less it knows; the
norm gives every key its length back (KV-Lingo, arXiv 2609.32610, fits keys before the norm for the same end).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvhub_kernels.workspace import Workspace

EPSILON = 1e-6
"""Added to the mean square. Models write 1e-6 or 1e-5; mapped keys have a mean square of about 1."""


def normalise(keys: Tensor, weight: Tensor) -> Tensor:
    """`weight * keys / rms(keys)` for keys `[..., heads, head_dim]` without RoPE, weight `[head_dim]`.

    Differentiable; in float32, or in the keys' wider dtype.
    """
    wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
    return wide * (wide.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.to(wide)


def normalise_(rows: Tensor, weight: Tensor, space: Workspace) -> Tensor:
    """`normalise` in place, for rows `[tokens, heads, head_dim]` float32 of any strides."""
    size = space.take("size", (*rows.shape[:2], 1), torch.float32)
    torch.linalg.vector_norm(rows, dim=-1, keepdim=True, out=size)
    size.square_().div_(rows.shape[-1]).add_(EPSILON).rsqrt_()
    return rows.mul_(size).mul_(weight)
