"""What the one script for a GPU checks first, where its time runs out."""

from __future__ import annotations

import itertools

from benchmarks.gpu_checks import FIELDS, shapes


def test_every_two_values_meet_early():
    found = shapes()
    assert found == shapes() and len({tuple(shape.values()) for shape in found}) == len(found) <= 160
    for name, values in FIELDS.items():
        assert {shape[name] for shape in found[:16]} == set(values)
    for a, b in itertools.combinations(FIELDS, 2):
        met = {(shape[a], shape[b]) for shape in found[:60]}
        assert met == set(itertools.product(FIELDS[a], FIELDS[b]))


def test_large_models_in_every_support_length_and_dtype():
    core = [s for s in shapes() if (s["k"], s["dim"], s["heads"], s["int8"]) == (8, 128, 8, False)]
    for values in itertools.product(FIELDS["support"], FIELDS["tokens"], FIELDS["dtype"]):
        assert any((s["support"], s["tokens"], s["dtype"]) == values for s in core)
