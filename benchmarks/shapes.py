"""Shapes of real pairs with random weights and rows, for the benchmarks of `apply`.

Needs torch and kvhub_kernels only, so that it also runs where nothing else is installed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvhub_kernels.plan import Plan, Support
from kvhub_kernels.reference import read
from kvhub_kernels.rotary import RotaryTable, apply_rope, strip_rope
from kvhub_kernels.rows import Rows
from kvhub_kernels.weights import SIDES, Weights


class Pair(NamedTuple):
    """Layers, KV heads and head size of both models, and k (arXiv 2608.03893, table 1)."""

    source: tuple[int, int, int]
    target: tuple[int, int, int]
    k: int


PAIRS = {
    "Qwen2.5-Coder 0.5B->1.5B": Pair((24, 2, 64), (28, 2, 128), 8),
    "Qwen3 14B->32B": Pair((40, 8, 128), (64, 8, 128), 8),
    "Qwen3 8B->32B": Pair((36, 8, 128), (64, 8, 128), 12),
    "Llama 3.1 8B->70B": Pair((32, 8, 128), (80, 8, 128), 20),
    "Ministral 3 3B->8B": Pair((26, 8, 128), (34, 8, 128), 26),
    "Ministral 3 3B->14B": Pair((26, 8, 128), (40, 8, 128), 20),
    "Ministral 3 8B->14B": Pair((34, 8, 128), (40, 8, 128), 12),
}
"""The first is a pair that runs whole on a small machine; the others are the paper's six."""


def selection(pair: Pair) -> tuple[tuple[int, ...], ...]:
    """k source layers around the same depth with one left out, as fits choose them."""
    layers, targets, k = pair.source[0], pair.target[0], pair.k
    chosen = []
    for t in range(targets):
        width = min(k + 1, layers)
        first = min(max(0, round(t * layers / targets) - width // 2), layers - width)
        window = [layer for layer in range(first, first + width) if width == k or layer != first + k // 2]
        chosen.append(tuple(window[:k]))
    return tuple(chosen)


def make_plan(pair: Pair, support: Support, layers: int | None = None) -> Plan:
    """Of all target layers, or of `layers` of them from the middle."""
    chosen = selection(pair)
    if layers is not None:
        middle = (len(chosen) - layers) // 2
        chosen = chosen[middle : middle + layers]
    return Plan(support, chosen, *pair.source[1:], *pair.target[1:])


def make_weights(plan: Plan, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Weights:
    """Random weights that keep the size of the rows."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (plan.groups, plan.depth, plan.columns)[1 if plan.groups == 1 else 0 :]

    def tensors(layer: int, side: str) -> tuple[Tensor, Tensor]:
        weight = torch.empty(shape, dtype=dtype, device=device)
        weight.uniform_(-1, 1, generator=generator).mul_((3 / plan.depth) ** 0.5)
        bias = torch.empty((plan.target_heads, plan.target_dim), device=device)
        return weight, bias.normal_(generator=generator)

    return Weights.of(plan, tensors)


def make_rows(
    layers: int, heads: int, dim: int, tokens: int, dtype: torch.dtype, device: str = "cpu", *, page: int = 1
) -> Rows:
    """A pool a little larger than the sequence, whose pages lie in random order."""
    pages = -(-tokens // page) + 8
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).to(device)
    shape = (pages * page, heads, dim)
    keys, values = ([torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)] for _ in "kv")
    for layer in (*keys, *values):
        layer.normal_()
    return Rows(keys, values, tokens, order, page)


def make_table(dim: int, tokens: int, device: str = "cpu") -> RotaryTable:
    inverse = 1e6 ** -(torch.arange(0, dim, 2, device=device) / dim)
    return RotaryTable.build(inverse, torch.arange(tokens, device=device))


def eager(
    weights: Weights,
    heads: list[list[tuple[Tensor, Tensor]]],
    source: Rows,
    target: Rows,
    strip: RotaryTable,
    rotate: RotaryTable,
) -> None:
    """The mapper as the paper describes it: eager torch, layer by layer, a product for every head.

    heads: `[2 * layer + side][head]`: weight and bias of one target head, ready made.
    """
    plan = weights.plan
    slots = target.token_slots()
    for layer, chosen in enumerate(plan.source_layers):
        contents = [strip_rope(read(source.keys[s], source), strip) for s in chosen]
        values = [read(source.values[s], source) for s in chosen]
        for index, (rows, pool) in enumerate(((contents, target.keys), (values, target.values))):
            mapped = []
            for head, (weight, bias) in enumerate(heads[2 * layer + index]):
                parts = [row if plan.support == "full" else row[:, head] for row in rows]
                x = torch.cat([part.flatten(1) for part in parts], dim=-1)
                mapped.append(torch.addmm(bias, x.to(weight.dtype), weight))
            out = torch.stack(mapped, dim=1)
            pool[layer][slots] = (apply_rope(out, rotate) if index == 0 else out).to(target.dtype)


def per_head(weights: Weights, dtype: torch.dtype) -> list[list[tuple[Tensor, Tensor]]]:
    """Weights for `eager`."""
    plan, dim = weights.plan, weights.plan.target_dim
    ready = []
    for affine in weights:
        one = []
        for head in range(plan.target_heads):
            group, column = (0, head * dim) if plan.support == "full" else (head, 0)
            columns = slice(column, column + dim)
            weight = affine.weight[group, :, columns].to(dtype).contiguous()
            one.append((weight, affine.bias[group, columns].to(dtype)))
        ready.append(one)
    assert len(ready) == len(SIDES) * plan.layers
    return ready
