"""Weights in the order that the Triton kernels read: the two columns of a rotated pair side by side."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvhub_kernels.plan import Plan
from kvhub_kernels.rotary import RotaryTable
from kvhub_kernels.weights import Affine, Weights


@dataclass(frozen=True)
class Packed:
    """matrix: `[layers, 2, groups, 2, depth, pairs]` in the compute dtype or int8; dimension 3 tells the
    first from the second of every pair. bias, scale: `[layers, 2, groups, 2, pairs]` float32. norm:
    `[layers, 2, target_dim / 2]` float32, where keys are normalised.
    """

    plan: Plan
    matrix: Tensor
    bias: Tensor
    scale: Tensor | None
    norm: Tensor | None = None

    @classmethod
    def of(
        cls,
        weights: Weights,
        *,
        interleaved: bool,
        rotary_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Packed:
        """One layer at a time goes to `device`, so the peak is the packed size and one matrix.

        interleaved, rotary_dim: of the target's rotation. Errors: `ValueError` for an odd head size.
        """
        plan = weights.plan
        if plan.target_dim % 2 or plan.source_dim % 2:
            raise ValueError("the Triton kernels need even head sizes")
        order = pair_order(plan, interleaved=interleaved, rotary_dim=rotary_dim).to(device)
        shape = (plan.layers, 2, plan.groups, 2)
        kind = torch.int8 if weights.dtype == torch.int8 else dtype
        matrix = torch.empty((*shape, plan.depth, plan.columns // 2), dtype=kind, device=device)
        bias = torch.empty((*shape, plan.columns // 2), dtype=torch.float32, device=device)
        scale = torch.empty_like(bias) if kind == torch.int8 else None
        for layer, pair in enumerate(weights.sides):
            for side, affine in enumerate(pair):
                moved = Affine(*(None if part is None else part.to(device) for part in affine))  # type: ignore[arg-type]
                matrix[layer, side] = moved.weight[:, :, order].permute(0, 2, 1, 3)
                bias[layer, side] = moved.bias[:, order]
                if scale is not None and moved.scale is not None:
                    scale[layer, side] = moved.scale[:, order]
        norm = None
        if weights.norms is not None:
            one = head_order(plan.target_dim, interleaved=interleaved, rotary_dim=rotary_dim)
            norm = weights.norms[:, one].contiguous().to(device)
        return cls(plan, matrix, bias, scale, norm)

    @property
    def held(self) -> list[Tensor]:
        """All tensors."""
        parts = (self.matrix, self.bias, self.scale, self.norm)
        return [part for part in parts if part is not None]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.held)


def pair_order(plan: Plan, *, interleaved: bool, rotary_dim: int) -> Tensor:
    """Columns of one matrix as `[2, pairs]`: first and second of each pair, int64, head after head."""
    one = head_order(plan.target_dim, interleaved=interleaved, rotary_dim=rotary_dim)
    heads = torch.arange(plan.columns // plan.target_dim) * plan.target_dim
    return (heads[None, :, None] + one[:, None, :]).flatten(1)


def head_order(dim: int, *, interleaved: bool, rotary_dim: int) -> Tensor:
    """Dimensions of one head as `[2, dim / 2]`: first and second of each pair, int64.

    Dimensions that are not rotated are paired too, half against half, and turned by nothing.
    """
    if interleaved:
        return torch.arange(dim).view(-1, 2).t()
    rotated, rest = torch.arange(rotary_dim).view(2, -1), torch.arange(rotary_dim, dim).view(2, -1)
    return torch.cat((rotated, rest), dim=1)


def tables(table: RotaryTable, *, back: bool) -> tuple[Tensor, Tensor, float]:
    """cos, sin as the kernels read them, and the factor that undoes the scale (1 forwards)."""
    factor = 1.0 / (table.scale * table.scale) if back else 1.0
    return table.cos.contiguous(), table.sin.contiguous(), factor
