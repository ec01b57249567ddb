"""Paired bootstrap over windows.

The windows are the clusters: positions inside one share a document and are not
independent. One resample draws whole windows with replacement and is applied to
all arms and metrics alike, so differences between arms are paired. Several
domains are resampled each within itself (stratified): the mix is ours, not chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Statistic = Callable[[Array], Array]
"""From window weights `[samples, windows]` to one number a sample, `[samples]`."""


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % percentile interval."""

    value: float
    low: float
    high: float


class Bootstrap:
    """Resamples of `sum(strata)` windows, drawn once from `seed`.

    strata: how many windows each domain has, in the order of the window axis.
    """

    def __init__(self, strata: Sequence[int], *, resamples: int = 2000, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        draws = [rng.multinomial(n, np.full(n, 1 / n), size=resamples) for n in strata]
        self.windows = sum(strata)
        self._weights = np.concatenate(draws, axis=1).astype(np.float64)

    def estimate(self, statistic: Statistic) -> Estimate:
        """`statistic` of all windows, and of the resamples its 2.5 % and 97.5 % quantiles.

        A resample on which the statistic is undefined (NaN) does not count. When the whole is
        undefined, so is the estimate: all three are NaN.
        """
        value = float(statistic(np.ones((1, self.windows)))[0])
        sampled = statistic(self._weights)
        sampled = sampled[~np.isnan(sampled)]
        if np.isnan(value) or sampled.size == 0:
            return Estimate(float("nan"), float("nan"), float("nan"))
        low, high = np.quantile(sampled, (0.025, 0.975))
        return Estimate(value, float(low), float(high))

    def mean(self, values: Array) -> Estimate:
        """The mean of `values` `[windows]`, each window with the same weight."""
        return self.estimate(lambda weights: weights @ values / weights.sum(1))


def ratio(weights: Array, sums: Array, counts: Array) -> Array:
    """Weighted mean per position, `[samples]`: windows' `sums` `[windows]` over their `counts`."""
    mean: Array = (weights @ sums) / (weights @ counts)
    return mean
