"""From answers, item by item, to retention and its relatives, with paired intervals.

    retention         mapped / native, of accuracies (arXiv 2608.03893, section 4)
    floor-normalised  (mapped - chance) / (native - chance), undefined where native is not above chance,
                      its interval included
    gap recovered     (mapped - source) / (native - source)
    loss              native - mapped

Retention alone misleads: a source that is nearly as good as the target retains nearly all without any
cache. So the source alone stands beside it, and the gap recovered where there is a gap beyond chance.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from kvhub.errors import BadInput
from kvhub.evaluation.bootstrap import Array, Bootstrap, Estimate, ratio
from kvhub.evaluation.evidence import Arm

UNDEFINED = Estimate(np.nan, np.nan, np.nan)


@dataclass(frozen=True)
class TaskScores:
    """One task: fractions with 95 % intervals; the same resampled items for all arms."""

    name: str
    metric: str
    n: int
    chance: float
    accuracy: dict[Arm, Estimate]
    retention: Estimate
    floor_normalised: Estimate
    loss: Estimate
    gap_recovered: Estimate | None
    """None where the target does not beat the source beyond chance."""


def require_arms(arms: Collection[Arm]) -> None:
    """Native and mapped are what every score compares. Errors: `BadInput`."""
    if not {"native", "mapped"} <= set(arms):
        raise BadInput("the arms native and mapped are needed", "add them to --arm, or leave --arm out")


def task_scores(
    name: str,
    metric: str,
    chance: float,
    answers: Mapping[Arm, Array],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> TaskScores:
    """answers: by arm, `native` and `mapped` among them, `[items]`: 1 where the item is right, or its F1."""
    native, mapped = answers["native"], answers["mapped"]
    draw = Bootstrap([len(native)], resamples=resamples, seed=seed)
    ones = np.ones_like(native)

    def mean(weights: Array, values: Array) -> Array:
        return ratio(weights, values, ones)

    def share(low: Array | float) -> Estimate:
        floor = np.full_like(native, low) if isinstance(low, float) else low

        def statistic(weights: Array) -> Array:
            base = mean(weights, floor)
            part, whole = mean(weights, mapped) - base, mean(weights, native) - base
            with np.errstate(divide="ignore", invalid="ignore"):
                found: Array = np.where(whole > 0, part / whole, np.nan)
            return found

        return draw.estimate(statistic)

    gap = None
    if "source" in answers:
        ahead = draw.estimate(lambda w: mean(w, native) - mean(w, answers["source"]))
        gap = share(answers["source"]) if ahead.low > 0 else None
    return TaskScores(
        name=name,
        metric=metric,
        n=len(native),
        chance=chance,
        accuracy={arm: draw.mean(values) for arm, values in answers.items()},
        retention=share(0.0),
        floor_normalised=share(float(chance)) if draw.mean(native).low > chance else UNDEFINED,
        loss=draw.estimate(lambda w: mean(w, native) - mean(w, mapped)),
        gap_recovered=gap,
    )


@dataclass(frozen=True)
class Overall:
    """Over tasks, each with the same weight; NaN where no task has the figure."""

    retention: float
    floor_normalised: float
    """Of the tasks that native does better than guessing."""
    worst_task: str
    worst_retention: float


def overall(tasks: list[TaskScores]) -> Overall:
    """Means over tasks, and the task that retains least; a mean alone hides the task that breaks."""

    def mean(values: list[float]) -> float:
        known = [value for value in values if not np.isnan(value)]
        return float(np.mean(known)) if known else float("nan")

    kept = [task.retention.value for task in tasks]
    worst = int(np.argmin(np.nan_to_num(kept, nan=np.inf)))
    return Overall(
        retention=mean(kept),
        floor_normalised=mean([task.floor_normalised.value for task in tasks]),
        worst_task=tasks[worst].name,
        worst_retention=kept[worst],
    )
