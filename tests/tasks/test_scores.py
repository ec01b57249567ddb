import math

import numpy as np
import pytest

from kvhub.tasks.scores import overall, task_scores

NATIVE = np.array([1.0, 1, 1, 1, 0, 1, 1, 1, 0, 1] * 8)
MAPPED = np.array([1.0, 1, 0, 1, 0, 1, 1, 0, 0, 1] * 8)
SOURCE = np.array([1.0, 0, 0, 1, 0, 1, 0, 0, 0, 1] * 8)


def test_values_are_the_formulas_and_intervals_hold_them():
    found = task_scores("arc", "acc", 0.25, {"native": NATIVE, "mapped": MAPPED, "source": SOURCE})
    assert (found.n, found.accuracy["mapped"].value) == (80, pytest.approx(0.6))
    assert found.retention.value == pytest.approx(0.6 / 0.8)
    assert found.floor_normalised.value == pytest.approx((0.6 - 0.25) / (0.8 - 0.25))
    assert found.loss.value == pytest.approx(0.2)
    assert found.gap_recovered.value == pytest.approx((0.6 - 0.4) / (0.8 - 0.4))
    for estimate in (found.retention, found.loss, found.gap_recovered):
        assert estimate.low < estimate.value < estimate.high


def test_items_are_paired():
    both = task_scores("same", "acc", 0.5, {"native": NATIVE, "mapped": NATIVE})
    assert (both.retention.low, both.retention.high, both.loss.low, both.loss.high) == (1, 1, 0, 0)


def test_a_share_of_nothing_has_no_meaning():
    level = task_scores("level", "acc", 0.25, {"native": NATIVE, "mapped": MAPPED, "source": NATIVE})
    assert level.gap_recovered is None
    none = task_scores("none", "acc", 0.0, {"native": NATIVE * 0, "mapped": MAPPED})
    assert math.isnan(none.retention.value)
    guess = task_scores("guess", "acc", 0.9, {"native": NATIVE, "mapped": MAPPED})
    assert math.isnan(guess.floor_normalised.value)  # it was above 1 where mapped was further below chance
    near = task_scores("near", "acc", 0.75, {"native": NATIVE, "mapped": MAPPED})
    assert math.isnan(near.floor_normalised.value)  # 0.8 of 80 items is not above 0.75 beyond noise
    total = overall([none, guess])
    assert (total.worst_task, total.retention) == ("guess", guess.retention.value)
    assert math.isnan(total.floor_normalised)
    assert math.isnan(overall([none]).worst_retention)


def test_the_same_seed_gives_the_same_interval():
    one, two, other = (
        task_scores("a", "acc", 0.2, {"native": NATIVE, "mapped": MAPPED}, seed=s) for s in (1, 1, 2)
    )
    assert one == two
    assert one.retention.low != other.retention.low or one.retention.high != other.retention.high


def test_the_worst_task_is_named():
    good = task_scores("good", "acc", 0.25, {"native": NATIVE, "mapped": NATIVE})
    bad = task_scores("bad", "acc", 0.25, {"native": NATIVE, "mapped": SOURCE})
    total = overall([good, bad])
    assert (total.worst_task, total.worst_retention) == ("bad", pytest.approx(0.5))
    assert total.retention == pytest.approx(0.75)
