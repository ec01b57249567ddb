"""Weights of a mapper in the shapes that the kernels read, float or int8 with a scale per column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvhub_kernels.plan import Plan

Side = Literal["k", "v"]
SIDES: tuple[Side, Side] = ("k", "v")


class Affine(NamedTuple):
    """`out = (x @ weight) * scale + bias` of one side of one target layer, by group.

    weight: `[groups, depth, columns]` float32, bfloat16, float16 or int8.
    bias: `[groups, columns]` float32. scale: the same, for int8; else None.
    """

    weight: Tensor
    bias: Tensor
    scale: Tensor | None = None

    def dense(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The matrix that this stands for, in `dtype`."""
        weight = self.weight.to(dtype)
        return weight if self.scale is None else weight * self.scale.to(dtype)[:, None, :]


def quantize(affine: Affine) -> Affine:
    """int8 weights with one scale per column: the column's largest magnitude becomes 127."""
    weight = affine.dense(torch.float32)
    scale = weight.abs().amax(dim=1).div_(127.0)
    scale[scale == 0] = 1.0
    return Affine((weight / scale[:, None, :]).round_().to(torch.int8), affine.bias, scale)


@dataclass(frozen=True)
class Weights:
    """`sides[t]` holds the key and the value map of target layer t. Tensors are shared, not copied."""

    plan: Plan
    sides: tuple[tuple[Affine, Affine], ...]
    norms: Tensor | None = None
    """`[layers, target_dim]` float32: keys go through `normalise` with these weights before the rotation."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        tensors: Callable[[int, Side], tuple[Tensor, ...]],
        norms: Sequence[Tensor] | None = None,
    ) -> Weights:
        """From `tensors(target_layer, side) -> weight, bias[, scale]` as artifacts hold them.

        weight: `full` `[depth, columns]`, `head-local` `[groups, depth, columns]`; bias, and scale for int8,
        `[target_heads, target_dim]`. norms: `[target_dim]` a target layer, where keys are normalised.
        Errors: `ValueError` for other shapes.
        """
        shape = (plan.groups, plan.depth, plan.columns)

        def one(layer: int, side: Side) -> Affine:
            weight, *columns = tensors(layer, side)
            if weight.numel() != plan.groups * plan.depth * plan.columns or weight.shape[-1] != plan.columns:
                raise ValueError(f"weight of layer {layer}, {side} is not {list(shape)}")
            if (weight.dtype == torch.int8) != (len(columns) == 2):
                raise ValueError(f"int8 weights, and no others, have scales (layer {layer}, {side})")
            rows = [column.reshape(plan.groups, plan.columns).to(torch.float32) for column in columns]
            return Affine(weight.reshape(shape), *rows)

        sides = tuple((one(layer, "k"), one(layer, "v")) for layer in range(plan.layers))
        if norms is None:
            return cls(plan, sides)
        weights = torch.stack([norm.to(torch.float32) for norm in norms])
        if weights.shape != (plan.layers, plan.target_dim):
            raise ValueError(f"a norm's weights are not {[plan.target_dim]} in each of {plan.layers} layers")
        return cls(plan, sides, weights)

    def __iter__(self) -> Iterator[Affine]:
        return (side for pair in self.sides for side in pair)

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrices."""
        return self.sides[0][0].weight.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that all tensors take."""
        norms = 0 if self.norms is None else self.norms.nbytes
        return norms + sum(tensor.nbytes for affine in self for tensor in affine if tensor is not None)

    def quantized(self) -> Weights:
        """The same map with int8 weights."""
        return replace(self, sides=tuple((quantize(key), quantize(value)) for key, value in self.sides))
