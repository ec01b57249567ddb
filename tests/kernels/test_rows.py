"""Where tokens lie in pages, written out by hand: the definition and the CPU path share the arithmetic."""

from __future__ import annotations

import pytest
import torch

from kvhub_kernels.cpu import CpuApplier
from kvhub_kernels.plan import Plan
from kvhub_kernels.reference import read
from kvhub_kernels.rotary import RotaryTable
from kvhub_kernels.rows import Rows
from kvhub_kernels.weights import Weights

PAGES = torch.tensor([3, 0, 2])
SLOTS = [12, 13, 14, 15, 0, 1, 2, 3, 8, 9]
"""Of ten tokens in pages of four."""


def cache(pages: torch.Tensor = PAGES) -> Rows:
    """Slot s holds s in every key and 100 + s in every value."""
    numbers = torch.arange(16.0)[:, None, None].expand(16, 1, 4).contiguous()
    return Rows([numbers], [numbers + 100], 10, pages, 4)


def test_slots_of_tokens() -> None:
    rows = cache()
    assert rows.token_slots().tolist() == SLOTS
    assert read(rows.keys[0], rows)[:, 0, 0].tolist() == SLOTS
    assert Rows(rows.keys, rows.values, 3, torch.tensor([5, 1, 7])).token_slots().tolist() == [5, 1, 7]
    assert Rows(rows.keys, rows.values, 4, PAGES, 4).token_slots().tolist() == SLOTS[:4]
    assert Rows(rows.keys, rows.values, 16).token_slots() is None


def test_pages_that_are_not_contiguous_are_refused() -> None:
    """Kernels read them by address: every second entry of a table, one entry for all."""
    rows = cache()
    for pages in (torch.arange(6)[::2], torch.zeros(3, 2, dtype=torch.int64)[:, 0], PAGES[:1].expand(3)):
        with pytest.raises(ValueError, match="contiguous"):
            Rows(rows.keys, rows.values, 10, pages, 4)


def test_what_is_no_number_of_tokens_or_no_rotation_is_refused() -> None:
    rows, angles = cache(), torch.ones(4, 2)
    with pytest.raises(ValueError, match="-3 tokens"):
        Rows(rows.keys, rows.values, -3)
    for wrong in ({"pairing": "weird"}, {"scale": 0.0}, {"scale": float("nan")}, {"scale": -1.0}):
        with pytest.raises(ValueError, match="no rotation"):
            RotaryTable(angles, angles, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [None, 3])
def test_what_is_mapped_lies_where_it_should(chunk: int | None) -> None:
    """A mapper that changes nothing copies slot 12 to 4, the first of the target's first page, and so on."""
    plan = Plan("full", ((0,),), 1, 4, 1, 4)
    weights = Weights.of(plan, lambda layer, side: (torch.eye(4), torch.zeros(1, 4)))
    still = RotaryTable(torch.ones(10, 2), torch.zeros(10, 2))
    source, target = cache(), cache(torch.tensor([1, 3, 0]))
    for layer in (target.keys[0], target.values[0]):
        layer.fill_(-1)
    CpuApplier(weights, chunk=chunk).apply(source, target, still, still)
    wanted = [-1.0] * 16
    for found, slot in zip(SLOTS, [4, 5, 6, 7, 12, 13, 14, 15, 0, 1], strict=True):
        wanted[slot] = found
    assert target.keys[0][:, 0, 2].tolist() == wanted
    assert target.values[0][:, 0, 2].tolist() == [100 + x if x >= 0 else x for x in wanted]
