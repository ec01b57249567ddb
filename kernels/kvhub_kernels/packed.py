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
    first from the second of every pair. bias, scale: `[layers, 2, groups, 2, pairs]` float32.
    """

    plan: Plan
    matrix: Tensor
    bias: Tensor
    scale: Tensor | None

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
        return cls(plan, matrix, bias, scale)

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes + self.bias.nbytes + (0 if self.scale is None else self.scale.nbytes)


def pair_order(plan: Plan, *, interleaved: bool, rotary_dim: int) -> Tensor:
    """Columns of one matrix as `[2, pairs]`: first and second of each pair, int64.

    Dimensions that are not rotated are paired too, half against half, and turned by nothing.
    """
    dim, half = plan.target_dim, rotary_dim // 2
    if interleaved:
        one = torch.arange(dim).view(-1, 2).t()
    else:
        rotated, rest = torch.arange(2 * half).view(2, -1), torch.arange(2 * half, dim).view(2, -1)
        one = torch.cat((rotated, rest), dim=1)
    heads = torch.arange(plan.columns // dim) * dim
    return (heads[None, :, None] + one[:, None, :]).flatten(1)


def tables(table: RotaryTable, *, back: bool) -> tuple[Tensor, Tensor, float]:
    """cos, sin as the kernels read them, and the factor that undoes the scale (1 forwards)."""
    factor = 1.0 / (table.scale * table.scale) if back else 1.0
    return table.cos.contiguous(), table.sin.contiguous(), factor
