"""The selected source layers of a target layer side by side, as one operand of a product on the CPU.

Neighbouring target layers read nearly the same source layers. So a layer stays where it lies while the
next target layer reads it too, and the rows of the matrices are put in that order once, when they are
prepared. Joining every target layer anew took a tenth of the time of the products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvhub_kernels.plan import Plan

ONES = 4
"""Columns after the selected layers in bfloat16: three of ones, which carry the bias, and one of zeros."""


def places(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """For each target layer the source layer in each of the k places, as few of them changed as can be."""
    held: list[int] = []
    found = []
    for chosen in plan.source_layers:
        fresh = [layer for layer in chosen if layer not in held]
        held = [layer if layer in chosen else fresh.pop(0) for layer in held] if held else list(chosen)
        found.append(tuple(held))
    return tuple(found)


def in_order(plan: Plan, target_layer: int, order: Sequence[int], weight: Tensor) -> Tensor:
    """`[groups, depth, columns]`, its blocks of rows in the order of `order`; a copy only if it differs."""
    chosen = plan.source_layers[target_layer]
    if tuple(order) == chosen:
        return weight
    index = torch.tensor([chosen.index(layer) for layer in order], device=weight.device)
    blocks = weight.view(plan.groups, plan.k, plan.width, plan.columns)
    return blocks.index_select(1, index).view(weight.shape)


class Joined:
    """Rows `[groups, tokens, k * width (+ ONES)]` that follow the target layers."""

    def __init__(self, plan: Plan, order: Sequence[Sequence[int]], rows: Tensor) -> None:
        """rows: the buffer, whose contents are of no interest; extra columns become the ones."""
        self._plan, self._order, self.rows = plan, order, rows
        self._held: list[int | None] = [None] * plan.k
        if rows.shape[2] > plan.depth:
            rows[:, :, plan.depth : plan.depth + ONES - 1] = 1
            rows[:, :, plan.depth + ONES - 1 :] = 0

    def of(self, target_layer: int, content: Mapping[int, Tensor]) -> Tensor:
        """The operand of `target_layer`; content: `[groups, tokens, width]` of every source layer in use."""
        width = self._plan.width
        for place, layer in enumerate(self._order[target_layer]):
            if self._held[place] != layer:
                self.rows[:, :, place * width : (place + 1) * width].copy_(content[layer])
                self._held[place] = layer
        return self.rows
