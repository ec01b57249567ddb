"""From per-window sums to scores with intervals, for one domain or for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvhub.evaluation.arms import WindowResult
from kvhub.evaluation.bootstrap import Bootstrap, Estimate, Statistic, ratio
from kvhub.evaluation.evidence import ALL, ARMS, Arm, LayerScores, Score
from kvhub.evaluation.metrics import Array, RowMoments, gap_recovered
from kvhub.model.identity import within_bounds


def summarize(
    results: Mapping[str, Sequence[WindowResult]], *, resamples: int, seed: int
) -> tuple[list[Score], list[LayerScores]]:
    """Scores of every domain and of `all` (every window, resampled within its domain), and the layers'."""
    scores: list[Score] = []
    for name, windows in results.items():
        scores += _domain(name, windows, Bootstrap([len(windows)], resamples=resamples, seed=seed))
    pooled = [window for windows in results.values() for window in windows]
    strata = [len(windows) for windows in results.values()]
    scores += _domain(ALL, pooled, Bootstrap(strata, resamples=resamples, seed=seed))
    return scores, _layers(pooled)


def _domain(domain: str, windows: Sequence[WindowResult], bootstrap: Bootstrap) -> list[Score]:
    counts = np.array([w.positions for w in windows], dtype=np.float64)
    positions = int(counts.sum())
    nll = {arm: np.array([w.sums[arm].nll for w in windows]) for arm in ARMS}
    kl = {arm: np.array([w.sums[arm].kl for w in windows]) for arm in ARMS}
    top1 = {arm: np.array([w.sums[arm].top1 for w in windows]) for arm in ARMS}
    scores: list[Score] = []

    def add(metric: str, arm: Arm, n: int, statistic: Statistic) -> None:
        found: Estimate = bootstrap.estimate(statistic)
        if not np.isnan(found.value):
            scores.append(
                Score(
                    metric=metric,
                    arm=arm,
                    domain=domain,
                    value=within_bounds(found.value),
                    low=within_bounds(found.low),
                    high=within_bounds(found.high),
                    n=n,
                )
            )

    for arm in ARMS:
        excess = nll[arm] - nll["native"]
        add("nll", arm, positions, lambda w, x=nll[arm]: ratio(w, x, counts))  # type: ignore[misc]
        add("ppl_ratio", arm, positions, lambda w, x=excess: np.exp(ratio(w, x, counts)))  # type: ignore[misc]
        add("excess_nll", arm, positions, lambda w, x=excess: ratio(w, x, counts))  # type: ignore[misc]
        add("kl", arm, positions, lambda w, x=kl[arm]: ratio(w, x, counts))  # type: ignore[misc]
        add("top1", arm, positions, lambda w, x=top1[arm]: ratio(w, x, counts))  # type: ignore[misc]

    gap = bootstrap.estimate(lambda w: ratio(w, nll["source"] - nll["native"], counts))
    if gap.low > 0:  # the target is better than the source beyond chance: only then is there a gap
        means: Statistic = lambda w: gap_recovered(  # noqa: E731
            ratio(w, nll["native"], counts), ratio(w, nll["source"], counts), ratio(w, nll["mapped"], counts)
        )
        add("gap_recovered", "mapped", positions, means)

    cosine = np.stack([w.cosine.mean(1) for w in windows])
    add("attention_cosine", "mapped", positions, lambda w: _layer_means(w, cosine, counts).mean(1))
    add("attention_cosine_worst", "mapped", positions, lambda w: _layer_means(w, cosine, counts).min(1))
    for metric, moments in (("r2_key", [w.keys for w in windows]), ("r2_value", [w.values for w in windows])):
        rows = sum(m.rows for m in moments)
        add(metric, "mapped", rows, lambda w, m=moments: r2(w, m).mean(1))  # type: ignore[misc]
    return scores


def _layer_means(weights: Array, per_window: Array, counts: Array) -> Array:
    """`[samples, layers]` from `[windows, layers]`, each window weighted by its positions."""
    means: Array = (weights * counts) @ per_window / (weights @ counts)[:, None]
    return means


def r2(weights: Array, moments: Sequence[RowMoments]) -> Array:
    """R2 of every layer on the weighted windows, `[samples, layers]`: mean over heads (see `RowMoments`).

    A head whose rows do not vary counts as 1 when they are hit exactly and as 0 otherwise.
    """
    rows = weights @ np.array([m.rows for m in moments], dtype=np.float64)
    layers = []
    for layer in range(moments[0].squares.shape[0]):  # by layer: the sums of all at once could be gigabytes
        sums = np.stack([m.sums[layer] for m in moments])
        total = np.tensordot(weights, sums, axes=1)
        squares = weights @ np.stack([m.squares[layer] for m in moments])
        spread = squares - (total**2).sum(-1) / rows[:, None]
        residual = weights @ np.stack([m.residuals[layer] for m in moments])
        flat = spread <= 1e-12 * np.maximum(squares, 1e-300)
        share = np.divide(residual, spread, out=(residual > 0).astype(np.float64), where=~flat)
        layers.append((1 - share).mean(1))
    return np.stack(layers, axis=1)


def _layers(windows: Sequence[WindowResult]) -> list[LayerScores]:
    counts = np.array([w.positions for w in windows], dtype=np.float64)
    heads = np.tensordot(counts, np.stack([w.cosine for w in windows]), axes=1) / counts.sum()
    ones = np.ones((1, len(windows)))
    keys, values = r2(ones, [w.keys for w in windows])[0], r2(ones, [w.values for w in windows])[0]
    return [
        LayerScores(
            attention_cosine=[float(head) for head in heads[layer]],
            r2_key=within_bounds(keys[layer]),
            r2_value=within_bounds(values[layer]),
        )
        for layer in range(heads.shape[0])
    ]
