"""The grouped products of a mapper on the CPU, float32 or bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from kvhub_kernels.joined import ONES, in_order, places
from kvhub_kernels.weights import Affine, Weights
from kvhub_kernels.workspace import Workspace


class Product:
    """`x @ weight * scale + bias` of any target layer; the sum is accumulated in float32.

    A product in bfloat16 comes out rounded, and a bias may be a hundred times the spread of its rows. So
    the bias is three more rows of the matrix, bfloat16 numbers that add up to it in float32, met by
    columns of ones: the large terms cancel inside the sum, and nothing is left to do after it.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"products are float32 or bfloat16, not {dtype}")
        self.plan, self.dtype = weights.plan, dtype
        self.order = places(self.plan)
        """The source layer in each place of the operand, for every target layer."""
        self.width = self.plan.depth + (ONES if dtype == torch.bfloat16 else 0)
        """Columns of the operand."""
        self._sides = [
            {side: self._prepared(layer, affine) for side, affine in zip("kv", pair, strict=True)}
            for layer, pair in enumerate(weights.sides)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights."""
        affines = (affine for sides in self._sides for affine in sides.values())
        return sum(tensor.nbytes for affine in affines for tensor in affine if tensor is not None)

    def __call__(self, target_layer: int, side: str, x: Tensor, space: Workspace) -> Tensor:
        """x: `[groups, tokens, width]`, the layers in the places of `order`, then ones.

        Returns `[tokens, target_heads, target_dim]`, float32 or rounded once to bfloat16, valid until
        the next call.
        """
        plan, affine = self.plan, self._sides[target_layer][side]
        tokens = x.shape[1]
        out = space.take("product", (plan.groups, tokens, plan.columns), self.dtype)
        matrix = self._matrix(affine, space)
        if self.dtype == torch.float32:
            if plan.groups == 1:
                torch.addmm(affine.bias, x[0], matrix[0], out=out[0])
            else:
                torch.baddbmm(affine.bias[:, None, :], x, matrix, out=out)
        elif plan.groups == 1:
            torch.mm(x[0], matrix[0], out=out[0])
        else:
            torch.bmm(x, matrix, out=out)
        if affine.scale is not None and self.dtype != torch.float32:
            out = space.take("scaled", out.shape, torch.float32).copy_(out).mul_(affine.scale[:, None, :])
        return (
            out.view(tokens, plan.target_heads, plan.target_dim) if plan.groups == 1 else out.transpose(0, 1)
        )

    def _prepared(self, layer: int, affine: Affine) -> Affine:
        """float32: as it is, in order. bfloat16: the bias as rows of the matrix, or of their own for int8."""
        weight = in_order(self.plan, layer, self.order[layer], affine.weight)
        if self.dtype == torch.float32:
            whole = weight if affine.scale is not None else weight.to(torch.float32)
            return Affine(whole, affine.bias, affine.scale)
        if affine.scale is None:
            return Affine(torch.cat((weight.to(self.dtype), _as_rows(affine.bias)), dim=1), affine.bias[:0])
        scale, nothing = affine.scale, affine.scale == 0
        if bool(nothing.any()):  # such a column is its bias alone, which is divided by its scale here
            scale = scale.masked_fill(nothing, 1.0)
            weight = weight.masked_fill(nothing[:, None, :], 0)
        return Affine(weight, _as_rows(affine.bias / scale), scale)

    def _matrix(self, affine: Affine, space: Workspace) -> Tensor:
        """The matrix to multiply by, in the compute dtype; whole numbers are exact in bfloat16."""
        if affine.scale is None:
            return affine.weight
        groups, depth, columns = affine.weight.shape
        matrix = space.take("matrix", (groups, self.width, columns), self.dtype)
        matrix[:, :depth].copy_(affine.weight)
        if self.dtype == torch.float32:
            return matrix.mul_(affine.scale[:, None, :])
        matrix[:, depth:].copy_(affine.bias)
        return matrix


def _as_rows(bias: Tensor) -> Tensor:
    """`[groups, columns]` float32 as `[groups, ONES, columns]` bfloat16 whose sum is the bias to 24 bits."""
    rows, rest = [], bias
    for _ in range(ONES - 1):
        rows.append(rest.to(torch.bfloat16))
        rest = rest - rows[-1]
    return torch.stack([*rows, torch.zeros_like(rows[0])], dim=1)
