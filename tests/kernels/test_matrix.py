"""The CPU path against the definition: every number of tokens, k, head size and number of heads, whole.

One set of weights and rows serves all lengths, and the definition is worked out for a sample of the tokens,
since rows do not see each other. Pages of 1, 16 and 64 slots take turns, scattered and, where they are read,
repeated. float32 and bfloat16 take turns too, and the few shapes that take most of the time are bfloat16 at
1,000 tokens; `KVHUB_EVERY_SHAPE=1` runs every shape in both (some minutes).
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from support.applying import TOLERANCE, relative

from kvhub_kernels.cpu import CpuApplier
from kvhub_kernels.plan import Plan
from kvhub_kernels.reference import map_layer_reference
from kvhub_kernels.rotary import RotaryTable
from kvhub_kernels.rows import Rows
from kvhub_kernels.weights import Weights

LAYERS = 9
TOKENS = (1, 63, 1000)
SAMPLE = torch.tensor([0, 1, 16, 31, 40, 62, 63, 64, 255, 256, 511, 512, 700, 998, 999])
EVERY = os.environ.get("KVHUB_EVERY_SHAPE") == "1"
LARGE = 6000
"""Inputs of one product from which on a float32 one takes a second."""


def pool(layers: int, heads: int, dim: int, page: int, generator: torch.Generator) -> Rows:
    """Rows of 1,000 tokens in pages of random order; keys have means of their own, as real ones do."""
    pages = -(-1000 // page) + 3
    slots = torch.randperm(pages, generator=generator)
    made = torch.randn(2, layers, pages * page, heads, dim, generator=generator)
    made[0] += 3 * torch.randn(heads, dim, generator=generator)
    return Rows(list(made[0]), list(made[1]), 1000, slots, page)


def part(rows: Rows, tokens: int) -> Rows:
    return Rows(rows.keys, rows.values, tokens, rows.slots, rows.page_size)


def first(table: RotaryTable, tokens: int | torch.Tensor) -> RotaryTable:
    chosen = tokens if isinstance(tokens, torch.Tensor) else slice(0, tokens)
    return RotaryTable(table.cos[chosen], table.sin[chosen], table.pairing, table.scale)


@pytest.mark.parametrize("support", ["full", "head-local"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_whole(support, dim):
    pages, dtypes = itertools.cycle((1, 16, 64)), itertools.cycle((torch.float32, torch.bfloat16))
    for heads in (1, 2, 3, 8):
        next(dtypes)  # another one for each k in turn
        generator = torch.Generator().manual_seed(dim + heads)
        page = next(pages)
        source = pool(LAYERS, heads, dim, page, generator)
        repeated = source.slots.clone()
        repeated[min(2, len(repeated) - 4)] = repeated[0]
        source = Rows(source.keys, source.values, 1000, repeated, page)
        target = pool(1, heads, dim, page, generator)
        angles = 10000.0 ** -torch.linspace(0, 0.9, dim // 2)
        table = RotaryTable.build(angles, torch.arange(1000) * 3 + 5, scale=1.1)
        for k in (1, 3, 8, LAYERS):
            large = support == "full" and k * heads * dim > LARGE
            for dtype in (torch.float32, torch.bfloat16) if EVERY or large else (next(dtypes),):
                lengths = TOKENS[:2] if large and dtype == torch.float32 and not EVERY else TOKENS
                one(support, k, source, target, table, dtype, lengths)


def one(support, k, source, target, table, dtype, lengths):
    generator = torch.Generator().manual_seed(k)
    heads, dim = source.heads, source.dim
    chosen = sorted(torch.randperm(LAYERS, generator=generator)[:k].tolist())
    plan = Plan(support, (tuple(chosen),), heads, dim, heads, dim)
    shape = (plan.groups, plan.depth, plan.columns)[plan.groups == 1 :]
    weights = Weights.of(
        plan,
        lambda layer, side: (
            (torch.rand(shape, generator=generator).sub_(0.5).mul_((12 / plan.depth) ** 0.5)).bfloat16(),
            5 * torch.randn(heads, dim, generator=generator),
        ),
    )
    slots = source.token_slots()[SAMPLE]
    few = Rows(source.keys, source.values, len(SAMPLE), slots)
    written = target.token_slots()
    rounded = None if dtype == torch.float32 else dtype
    sampled = first(table, SAMPLE)
    truths = map_layer_reference(weights, 0, few, sampled, sampled, rounded=rounded)
    applier = CpuApplier(weights, dtype)
    for tokens in lengths:
        for layer in (target.keys[0], target.values[0]):
            layer.fill_(float("nan"))
        angles = first(table, tokens)
        assert applier.apply(part(source, tokens), part(target, tokens), angles, angles)
        seen = tokens > SAMPLE
        for layer, truth in zip((target.keys[0], target.values[0]), truths, strict=True):
            error = relative(layer[written[SAMPLE[seen]]], truth[seen])
            where = f"{support} {tokens} tokens, k {k}, {heads} x {dim}, {dtype}"
            assert error < TOLERANCE[dtype], f"{where}: off by {error:.1e}"
            left = layer.isnan().flatten(1)
            assert int(left.all(1).sum()) == int(left.any(1).sum()) == len(layer) - tokens, where
