"""The grouped products of a mapper on the CPU, float32 or bfloat16."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvhub_kernels.weights import Affine, Weights
from kvhub_kernels.workspace import Workspace

BIAS_ROWS = 32
"""Rows added below a bfloat16 matrix: three carry the bias, the rest keep the depth a multiple of 32."""


class Product:
    """`x @ weight * scale + bias` of any target layer; the sum is accumulated in float32.

    In bfloat16 the bias is part of the sum, as three bfloat16 addends that make up its float32
    value: added after the sum was rounded, or rounded itself, it would cost a key that is small
    beside its bias most of its digits.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"products are float32 or bfloat16, not {dtype}")
        self.plan, self.dtype = weights.plan, dtype
        self._int8 = weights.dtype == torch.int8
        self._sides = [{"k": self._prepared(key), "v": self._prepared(value)} for key, value in weights.sides]

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
            joined = self._joined(x, columns, space)
            torch.bmm(joined, matrix, out=out)
            precise = space.take("sum", out.shape, torch.float32).copy_(out)
            if affine.scale is not None:
                precise *= affine.scale[:, None, :]
        if plan.groups == 1:
            return precise.view(tokens, plan.target_heads, plan.target_dim)
        return precise.transpose(0, 1)

    def _prepared(self, affine: Affine) -> Affine:
        if self.dtype == torch.float32:
            return affine if self._int8 else Affine(affine.weight.to(torch.float32), affine.bias)
        bias = affine.bias if affine.scale is None else affine.bias / affine.scale
        rows, rest = [], bias
        for _ in range(3):
            rows.append(rest.to(torch.bfloat16))
            rest = rest - rows[-1].float()
        addends = torch.stack(rows, dim=1)
        if self._int8:
            return Affine(affine.weight, addends, affine.scale)
        groups, depth, columns = affine.weight.shape
        matrix = affine.weight.new_zeros((groups, depth + BIAS_ROWS, columns), dtype=torch.bfloat16)
        matrix[:, :depth] = affine.weight
        matrix[:, depth : depth + 3] = addends
        return Affine(matrix, addends)

    def _matrix(self, affine: Affine, space: Workspace) -> Tensor:
        """The matrix to multiply by, in the compute dtype."""
        if affine.scale is None:
            return affine.weight
        groups, depth, columns = affine.weight.shape
        if self.dtype == torch.float32:
            matrix = space.take("matrix", affine.weight.shape, torch.float32).copy_(affine.weight)
            return matrix.mul_(affine.scale[:, None, :])
        matrix = space.take("matrix", (groups, depth + BIAS_ROWS, columns), torch.bfloat16)
        matrix[:, :depth] = affine.weight
        matrix[:, depth : depth + 3] = affine.bias
        matrix[:, depth + 3 :] = 0
        return matrix

    def _joined(self, x: Tensor, columns: Sequence[int], space: Workspace) -> Tensor:
        """The selected layers side by side and the columns that meet the bias, bfloat16.

        A sum of partial products would be rounded once for each part.
        """
        plan = self.plan
        joined = space.take("joined", (plan.groups, x.shape[1], plan.depth + BIAS_ROWS), self.dtype)
        for start, first, count in _runs(columns):
            part = joined[:, :, start * plan.width : (start + count) * plan.width]
            part.copy_(_part(x, first, count, plan.width))
        joined[:, :, plan.depth : plan.depth + 3] = 1
        joined[:, :, plan.depth + 3 :] = 0
        return joined

    def _accumulate(
        self, out: Tensor, matrix: Tensor, bias: Tensor, x: Tensor, columns: Sequence[int]
    ) -> None:
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
