from __future__ import annotations

from support.prose import documents

from kvhub.fit.overlap import drop_overlapping


def test_only_documents_that_repeat_the_calibration_side_are_dropped() -> None:
    calibration = documents(20, words=100)
    fresh = documents(3, words=100, seed=1)
    stub = "snail is a species of small sea snail a marine gastropod mollusk in the family of {}"
    templated = stub.format("Raphitomidae")
    half = " ".join(fresh[0].split()[:50] + calibration[4].split()[50:])
    kept = drop_overlapping(
        [fresh[0], templated, half, fresh[1], calibration[7], "short"],
        [*calibration, stub.format("Eulimidae"), "short"],
    )
    assert kept == [fresh[0], fresh[1]]


def test_a_little_overlap_is_allowed() -> None:
    words = documents(1, words=400)[0].split()
    quoting = " ".join(documents(1, words=390, seed=2)[0].split() + words[:14])
    assert drop_overlapping([quoting], [" ".join(words)]) == [quoting]  # 2 of 392 runs
    assert drop_overlapping([quoting], [" ".join(words)], limit=0.001) == []
    assert drop_overlapping([], ["x"]) == []
