"""Where the selected layers lie in the operand of the CPU path."""

from __future__ import annotations

import pytest
import torch

from kvhub_kernels.joined import ONES, Joined, in_order, places
from kvhub_kernels.plan import Plan

SELECTIONS = {
    "a window that moves": ((0, 1, 3), (1, 2, 4), (1, 2, 4), (2, 3, 5)),
    "all": ((0, 1, 2), (0, 1, 2)),
    "nothing in common": ((0, 1), (2, 3), (0, 1)),
    "one": ((3,), (3,), (1,)),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_every_layer_has_a_place_and_stays_in_it(name):
    plan = Plan("full", SELECTIONS[name], 1, 2, 1, 2)
    found = places(plan)
    changed = 0
    for before, chosen, now in zip(((), *found), plan.source_layers, found, strict=False):
        assert sorted(now) == list(chosen)
        for layer in set(before) & set(now):
            assert before.index(layer) == now.index(layer)
        changed += len(set(now) - set(before))
    buffer = torch.full((1, 3, plan.depth + ONES), float("nan"))
    joined = Joined(plan, found, buffer)
    content = {layer: torch.full((1, 3, 2), float(layer)) for layer in plan.used}
    copied = 0
    for target_layer, now in enumerate(found):
        held = list(joined._held)
        rows = joined.of(target_layer, content)
        copied += sum(a != b for a, b in zip(held, joined._held, strict=True))
        assert rows[0, 0].tolist() == [float(x) for layer in now for x in (layer, layer)] + [1, 1, 1, 0]
    assert copied == changed  # nothing was copied that was there


def test_the_rows_of_a_matrix_follow():
    plan = Plan("head-local", ((0, 2, 5),), 2, 3, 2, 4)
    weight = torch.randn(2, 9, 4)
    content = {layer: torch.randn(2, 7, 3) for layer in (0, 2, 5)}
    straight = torch.cat([content[layer] for layer in (0, 2, 5)], dim=2) @ weight
    turned = torch.cat([content[layer] for layer in (5, 0, 2)], dim=2) @ in_order(plan, 0, (5, 0, 2), weight)
    torch.testing.assert_close(turned, straight)
    assert in_order(plan, 0, (0, 2, 5), weight) is weight
