import numpy as np

from kvhub.evaluation.bootstrap import Bootstrap, ratio


def test_same_seed_same_interval_and_another_seed_another():
    x = np.random.default_rng(0).normal(size=20)
    one, two, other = (
        Bootstrap([20], resamples=200, seed=seed).estimate(lambda w: ratio(w, x, np.ones(20)))
        for seed in (1, 1, 2)
    )
    assert one == two
    assert np.allclose([one.value, other.value], x.mean())
    assert (one.low, one.high) != (other.low, other.high)


def test_intervals_cover_a_known_mean_about_as_often_as_they_say():
    rng = np.random.default_rng(3)
    hits, runs = 0, 300
    for seed in range(runs):
        x = rng.normal(loc=1.0, size=40)
        found = Bootstrap([40], resamples=400, seed=seed).estimate(lambda w, x=x: ratio(w, x, np.ones(40)))
        hits += found.low <= 1.0 <= found.high
    assert 0.90 <= hits / runs <= 0.98


def test_windows_are_the_clusters():
    # 10 windows of 50 positions that agree with each other: 500 positions tell no more than 10.
    means = np.random.default_rng(4).normal(size=10)
    counts = np.full(10, 50.0)
    found = Bootstrap([10], seed=0).estimate(lambda w: ratio(w, means * 50, counts))
    plain = 1.96 * means.std() / np.sqrt(10)
    assert 0.75 < (found.high - found.low) / (2 * plain) < 1.25


def test_differences_are_paired():
    # Windows differ widely, the arms by exactly 0.1 in each: the difference has no spread.
    base = np.random.default_rng(5).normal(scale=10, size=12)
    found = Bootstrap([12], seed=0).estimate(
        lambda w: ratio(w, base + 0.1, np.ones(12)) - ratio(w, base, np.ones(12))
    )
    assert np.allclose([found.value, found.low, found.high], 0.1)


def test_domains_keep_their_share():
    # Between-domain differences are not sampling noise.
    x = np.array([0.0] * 5 + [100.0] * 15)
    found = Bootstrap([5, 15], seed=0).estimate(lambda w: ratio(w, x, np.ones(20)))
    assert found.low == found.high == found.value == 75.0


def test_undefined_resamples_do_not_count_and_an_undefined_whole_is_undefined():
    bootstrap = Bootstrap([4], seed=0)
    some = bootstrap.estimate(lambda w: np.where(w[:, 0] > 0, 1.0, np.nan))
    assert (some.value, some.low, some.high) == (1.0, 1.0, 1.0)
    assert np.isnan(bootstrap.estimate(lambda w: np.full(len(w), np.nan)).value)
