"""The grouped products of a mapper on the CPU, float32 or bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvhub_kernels.weights import Affine, Weights
from kvhub_kernels.workspace import Workspace


class Product:
    """`x @ weight * scale + bias` of any target layer; the sum is accumulated in float32.

    A product in bfloat16 comes out rounded, and a bias may be a hundred times the spread of its rows.
    So its bfloat16 part is added inside the sum, where the two large terms cancel in float32, and what
    that part leaves out is added in float32 to the rounded sum.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"products are float32 or bfloat16, not {dtype}")
        self.plan, self.dtype = weights.plan, dtype
        self._int8 = weights.dtype == torch.int8
        self._sides = [{"k": self._prepared(key), "v": self._prepared(value)} for key, value in weights.sides]

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weights."""
        affines = (affine for sides in self._sides for affine in sides.values())
        return sum(tensor.nbytes for affine in affines for tensor in affine if tensor is not None)

    def __call__(
        self, target_layer: int, side: str, x: Tensor, columns: Sequence[int], space: Workspace
    ) -> Tensor:
        """x: `[groups, tokens, >= layers * width]`; columns: where the selected layers lie in it.

        Returns `[tokens, target_heads, target_dim]` float32, valid until the next call.
        """
        plan, affine = self.plan, self._sides[target_layer][side]
        tokens = x.shape[1]
        out = space.take("product", (plan.groups, tokens, plan.columns), self.dtype)
        matrix = self._matrix(affine, space)
        if self.dtype == torch.float32:
            self._accumulate(out, matrix, affine.bias, x, columns)
            precise = out
        else:
            self._at_once(out, matrix, affine.bias, x, columns, space)
            precise = space.take("sum", out.shape, torch.float32).copy_(out)
            precise += (affine.bias - affine.bias.to(torch.bfloat16))[:, None, :]
            if affine.scale is not None:
                precise *= affine.scale[:, None, :]
        if plan.groups == 1:
            return precise.view(tokens, plan.target_heads, plan.target_dim)
        return precise.transpose(0, 1)

    def _prepared(self, affine: Affine) -> Affine:
        if affine.scale is None:
            return Affine(affine.weight.to(self.dtype), affine.bias)
        if self.dtype == torch.float32:
            return affine
        return Affine(affine.weight, affine.bias / affine.scale, affine.scale)

    def _matrix(self, affine: Affine, space: Workspace) -> Tensor:
        """The matrix to multiply by, in the compute dtype; whole numbers are exact in bfloat16."""
        if affine.scale is None:
            return affine.weight
        matrix = space.take("matrix", affine.weight.shape, self.dtype).copy_(affine.weight)
        return matrix.mul_(affine.scale[:, None, :]) if self.dtype == torch.float32 else matrix

    def _at_once(
        self,
        out: Tensor,
        matrix: Tensor,
        bias: Tensor,
        x: Tensor,
        columns: Sequence[int],
        space: Workspace,
    ) -> None:
        """One bfloat16 product: a sum of several would be rounded once for each of them."""
        width = self.plan.width
        runs = list(_runs(columns))
        if len(runs) == 1:
            rows = _part(x, runs[0][1], runs[0][2], width)
        else:
            rows = space.take("joined", (*x.shape[:2], self.plan.depth), self.dtype)
            for start, first, count in runs:
                _part(rows, start, count, width).copy_(_part(x, first, count, width))
        coarse = bias.to(self.dtype)
        if self.plan.groups == 1:
            torch.addmm(coarse, rows[0], matrix[0], out=out[0])
        else:
            torch.baddbmm(coarse[:, None, :], rows, matrix, out=out)

    def _accumulate(
        self, out: Tensor, matrix: Tensor, bias: Tensor, x: Tensor, columns: Sequence[int]
    ) -> None:
        """float32: a product for each run of neighbouring layers, straight from the content rows."""
        width = self.plan.width
        parts = [
            (_part(x, first, count, width), matrix[:, start * width : (start + count) * width])
            for start, first, count in _runs(columns)
        ]
        (rows, weight), *more = parts
        if self.plan.groups == 1:
            torch.addmm(bias, rows[0], weight[0], out=out[0])
            for rows, weight in more:
                out[0].addmm_(rows[0], weight[0])
        else:
            torch.baddbmm(bias[:, None, :], rows, weight, out=out)
            for rows, weight in more:
                out.baddbmm_(rows, weight)


def _part(x: Tensor, first: int, count: int, width: int) -> Tensor:
    return x[:, :, first * width : (first + count) * width]


def _runs(columns: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring columns as (index in `columns`, first column, count)."""
    start = 0
    for index in range(1, len(columns) + 1):
        if index == len(columns) or columns[index] != columns[index - 1] + 1:
            yield start, columns[start], index - start
            start = index
