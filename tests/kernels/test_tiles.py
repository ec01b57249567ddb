"""The shipped table fits every GPU it may meet."""

from __future__ import annotations

import itertools

import pytest

from kvhub_kernels.tiles import TABLE, choose, lanes_of


@pytest.mark.parametrize(
    "capability, shared", [(80, 166912), (86, 101376), (90, 232448), (100, 232448), (120, 101376)]
)
def test_every_choice_fits(capability, shared):
    for support, tokens, pairs, width, itemsize, lanes in itertools.product(
        ("full", "head-local"), (1, 16, 17, 64, 65, 4096), (8, 40, 64, 512), (16, 80, 128, 2048), (2, 4),
        (0, 8, 32, 64, 128),
    ):  # fmt: skip
        tile = choose(
            support,
            tokens,
            pairs,
            width,
            capability=capability,
            shared=shared,
            itemsize=itemsize,
            lanes=lanes,
        )
        assert tile.pairs >= lanes
        assert tile.shared(itemsize) < shared
        assert tile.pairs >= 16 and tile.tokens >= 16 and tile.depth >= 16
        assert all(side & (side - 1) == 0 for side in tile[:4])
        assert tile.tokens <= 256  # the gather leaves room for whole tiles of up to so many


def test_the_table_covers_any_number_of_tokens():
    for least, support in itertools.product((80, 90), ("full", "head-local")):
        assert max(most for known, kind, most in TABLE if (known, kind) == (least, support)) >= 1 << 20


@pytest.mark.parametrize("dim, lanes", [(2, 1), (16, 8), (32, 16), (40, 32), (80, 64), (128, 64), (256, 128)])
def test_lanes_hold_a_head(dim, lanes):
    assert lanes_of(dim) == lanes
