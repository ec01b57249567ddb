"""What the one script for a GPU checks first, where its time runs out."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.gpu_apply import PART, error_of_part, parts
from benchmarks.gpu_checks import EXTRAS, FIELDS, FIRST, SQUARE, shapes
from benchmarks.shapes import PAIRS, make_plan, make_rows, make_table, make_weights
from kvhub_kernels.cpu import CpuApplier


def test_every_two_values_meet_early():
    found = shapes()
    assert found == shapes() and len({tuple(shape.values()) for shape in found}) == len(found) <= 170
    for name, values in FIELDS.items():
        assert {shape[name] for shape in found[:16]} == set(values)
    for a, b in itertools.combinations(FIELDS, 2):
        met = {(shape[a], shape[b]) for shape in found[:70] if shape not in EXTRAS}
        assert met == set(itertools.product(FIELDS[a], FIELDS[b]))


def test_large_models_in_every_support_length_and_dtype():
    core = [s for s in shapes() if (s["k"], s["dim"], s["heads"], s["int8"]) == (8, 128, 8, False)]
    for values in itertools.product(FIELDS["support"], FIELDS["tokens"], FIELDS["dtype"]):
        assert any((s["support"], s["tokens"], s["dtype"]) == values for s in core)


def test_what_differs_between_the_sides_comes_early():
    assert shapes()[FIRST : FIRST + len(EXTRAS)] == list(EXTRAS)
    assert all({name: shape[name] for name in SQUARE} == SQUARE for shape in shapes() if shape not in EXTRAS)

    def some(**wanted):
        return any(all(shape[name] == value for name, value in wanted.items()) for shape in EXTRAS)

    for support in FIELDS["support"]:
        assert some(support=support, norm=True) and some(support=support, pool="float16")
        assert some(support=support, repeated=True)
        assert any(shape["support"] == support and shape["target_dim"] for shape in EXTRAS)
    assert any(shape["target_heads"] not in (None, shape["heads"]) for shape in EXTRAS)
    assert some(norm=True, int8=True) and some(norm=True, pairing="interleaved")


@pytest.mark.parametrize("row", [0, 4095, 4096, 20480, 32767])
def test_a_wrong_row_anywhere_that_matters_of_a_long_prompt_is_seen(row):
    """The first and the last row, and those at the ends of chunks of 4,096."""
    starts = parts(32768)
    assert any(start <= row < start + PART for start in starts)
    assert starts[0] == 0 and starts[-1] == 32768 - PART and len(starts) >= 5


def test_a_part_of_the_rows_is_compared_with_the_same_rows():
    pair = PAIRS["Qwen2.5-Coder 0.5B->1.5B"]
    weights = make_weights(make_plan(pair, "head-local", 1), torch.float32)
    source = make_rows(pair.source[0], *pair.source[1:], 700, torch.float32, page=16)
    target = make_rows(1, *pair.target[1:], 700, torch.float32, page=64)
    strip, rotate = make_table(pair.source[2], 700), make_table(pair.target[2], 700)
    CpuApplier(weights).apply(source, target, strip, rotate)

    def error():
        return error_of_part(weights, torch.float32, source, target, strip, rotate, [0], 300)

    assert error() < 1e-5
    target.values[0][target.token_slots()[300 + PART - 1]] += 1
    assert error() > 1e-3
