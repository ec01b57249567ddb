"""From per-window diagnostics to scores with intervals, layers and position profiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvhub.diagnostics.record import LayerDiagnosis, PositionProfile
from kvhub.diagnostics.window import WindowDiagnosis
from kvhub.evaluation.bootstrap import Bootstrap
from kvhub.evaluation.evidence import ALL, Score
from kvhub.evaluation.metrics import Array
from kvhub.model.identity import within_bounds

FIRST = 4
"""Positions that `key_error_first` covers: the sink and its neighbours."""


def window_values(found: WindowDiagnosis) -> dict[str, Array]:
    """Layer values of one window by metric, `[layers]` each: means over heads, or over positions.

    The score of a metric is the mean over layers; `*_worst` is the worst layer's.
    """
    return {
        "attention_cosine": found.cosine.mean(1),
        "k_error_concentration": found.key_concentration.mean(1),
        "v_error_concentration": found.value_concentration.mean(1),
        "attention_kl": found.attention_kl.mean(1),
        "output_error": found.output_error.mean(1),
        "residual_error": found.residual_error,
        "key_error": found.key_errors.mean(1),
        "value_error": found.value_errors.mean(1),
        "key_error_first": found.key_errors[:, :FIRST].mean(1),
        "value_error_first": found.value_errors[:, :FIRST].mean(1),
    }


WORST = {"attention_cosine": "min", "residual_error": "max", "output_error": "max", "attention_kl": "max"}
"""Metrics that also get a `_worst` score, and which end of the layers is the worst."""


def summarize(results: Mapping[str, Sequence[WindowDiagnosis]], *, resamples: int, seed: int) -> list[Score]:
    """Scores of every domain and of `all`, intervals by a bootstrap over windows."""
    scores: list[Score] = []
    for name, windows in results.items():
        scores += _domain(name, windows, Bootstrap([len(windows)], resamples=resamples, seed=seed))
    pooled = [window for windows in results.values() for window in windows]
    strata = [len(windows) for windows in results.values()]
    return scores + _domain(ALL, pooled, Bootstrap(strata, resamples=resamples, seed=seed))


def _domain(domain: str, windows: Sequence[WindowDiagnosis], bootstrap: Bootstrap) -> list[Score]:
    by_window = [window_values(window) for window in windows]
    rows = sum(window.key_errors.shape[1] for window in windows)
    scores: list[Score] = []

    def add(metric: str, values: Array, worst: str | None) -> None:
        """values: `[windows, layers]`."""

        def statistic(weights: Array) -> Array:
            layers = weights @ values / weights.sum(1, keepdims=True)
            found: Array = layers.mean(1) if worst is None else getattr(layers, worst)(1)
            return found

        found = bootstrap.estimate(statistic)
        score = Score(
            metric=metric, arm="mapped", domain=domain, value=within_bounds(found.value),
            low=within_bounds(found.low), high=within_bounds(found.high), n=rows,
        )  # fmt: skip
        scores.append(score)

    for metric in by_window[0]:
        values = np.stack([window[metric] for window in by_window])
        add(metric, values, None)
        if metric in WORST:
            add(f"{metric}_worst", values, WORST[metric])
    return scores


def layers(windows: Sequence[WindowDiagnosis]) -> list[LayerDiagnosis]:
    """Means over windows, by target layer."""

    def mean(name: str) -> Array:
        found: Array = np.stack([getattr(window, name) for window in windows]).mean(0)
        return found

    heads = {
        "attention_cosine": mean("cosine"),
        "key_concentration": mean("key_concentration"),
        "value_concentration": mean("value_concentration"),
        "attention_kl": mean("attention_kl"),
        "output_error": mean("output_error"),
    }
    single = {
        "residual_error": mean("residual_error"),
        "key_error": mean("key_errors").mean(1),
        "value_error": mean("value_errors").mean(1),
    }
    return [
        LayerDiagnosis.model_validate(
            {name: values[layer].tolist() for name, values in heads.items()}
            | {name: float(values[layer]) for name, values in single.items()}
        )
        for layer in range(len(single["residual_error"]))
    ]


def profile(domain: str, windows: Sequence[WindowDiagnosis]) -> PositionProfile:
    """Errors by position, mean over windows and layers."""
    key, value = (
        np.stack([getattr(window, name) for window in windows]).mean((0, 1))
        for name in ("key_errors", "value_errors")
    )
    return PositionProfile(domain=domain, key=key.tolist(), value=value.tolist())
