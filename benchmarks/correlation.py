"""Which diagnostic leads where the loss goes? Correlations over the points of `correlation_points.py`.

    python -m benchmarks.correlation [--points benchmarks/results/correlation.csv]

Every diagnostic is compared with the loss on other windows (excess NLL; KL; top-1 lost), in three ways:

    pooled    Spearman over all points
    within    the recipes of one pair and direction: Spearman in each, averaged. Which recipe is better?
    across    one recipe, all pairs and directions: Spearman for each recipe, averaged. Will a pair work?

Diagnostics where more is better are turned round, so that +1 is a perfect predictor throughout. Intervals are
percentiles of a bootstrap over clusters: whole pairs are drawn, both directions and all recipes with them;
with few pairs they are wide. `lead` is the difference to attention-output cosine on the same
resamples.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import RESULTS

Array = NDArray[np.float64]
HIGHER_IS_BETTER = {
    "attention_cosine", "attention_cosine_worst", "calibration_attention_cosine",
    "r2_key", "r2_value", "calibration_r2_key", "calibration_r2_value",
}  # fmt: skip
NOT_PREDICTORS = {"pair", "source", "target", "recipe", "excess_nll", "kl", "top1", "positions"}
REFERENCE = "attention_cosine"
LOSSES = {"excess_nll": 1.0, "kl": 1.0, "top1": -1.0}
DRAWS = 400


def ranks(values: Array) -> Array:
    """Ranks from 0, ties averaged."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    found: Array = (np.cumsum(counts) - (counts + 1) / 2)[place]
    return found


def correlation(x: Array, y: Array) -> float:
    """Pearson; NaN where one side does not vary."""
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / size if size > 0 else float("nan")


def spearman(x: Array, y: Array) -> float:
    """Rank correlation."""
    return correlation(ranks(x), ranks(y))


def grouped(x: Array, y: Array, groups: NDArray[np.str_], least: int) -> float:
    """Mean over groups of at least `least` points of the rank correlation inside each."""
    found = [
        spearman(x[groups == g], y[groups == g]) for g in np.unique(groups) if (groups == g).sum() >= least
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(np.nanmean(found)) if found else float("nan")


class Points:
    """The table, and the same table of resampled pairs."""

    def __init__(self, path: Path, only: set[str] | None = None) -> None:
        with path.open() as file:
            rows = [row for row in csv.DictReader(file) if only is None or row["recipe"] in only]
        self.pair = np.array([row["pair"] for row in rows])
        self.direction = np.array([f"{row['source']}>{row['target']}" for row in rows])
        self.recipe = np.array([row["recipe"] for row in rows])
        names = [name for name in rows[0] if name not in NOT_PREDICTORS]
        self.loss = {
            name: sign * np.array([float(row[name]) for row in rows]) for name, sign in LOSSES.items()
        }
        self.predictors = {
            name: (-1 if name in HIGHER_IS_BETTER else 1)
            * np.array([float(row[name]) if row[name] else np.nan for row in rows])
            for name in names
        }

    def resample(self, draws: int, seed: int = 0) -> list[tuple[NDArray[np.intp], NDArray[np.str_]]]:
        """Row numbers of drawn pairs, and a name for each row's copy of its direction.

        The order of a draw does not matter, so there are few different ones: equal ones share an object.
        """
        rng = np.random.default_rng(seed)
        pairs = np.unique(self.pair)
        made: dict[tuple[str, ...], tuple[NDArray[np.intp], NDArray[np.str_]]] = {}
        found = []
        for _ in range(draws):
            chosen = tuple(sorted(rng.choice(pairs, len(pairs))))
            if chosen not in made:
                index = [np.flatnonzero(self.pair == pair) for pair in chosen]
                copies = [np.char.add(self.direction[rows], f"#{n}") for n, rows in enumerate(index)]
                made[chosen] = np.concatenate(index), np.concatenate(copies)
            found.append(made[chosen])
        return found


def measures(points: Points, name: str, loss: str, rows: NDArray[np.intp], copies: NDArray[np.str_]) -> Array:
    """(pooled, within, across), over the points that have the predictor."""
    have = ~np.isnan(points.predictors[name][rows])
    rows, copies = rows[have], copies[have]
    x, y = points.predictors[name][rows], points.loss[loss][rows]
    if len(rows) < 4:
        return np.full(3, np.nan)
    return np.array([spearman(x, y), grouped(x, y, copies, 4), grouped(x, y, points.recipe[rows], 4)])


def bounds(values: Array) -> tuple[float, float]:
    """2.5 % and 97.5 % quantiles of what is not NaN; NaN where nothing is."""
    have = values[~np.isnan(values)]
    return (float("nan"),) * 2 if have.size == 0 else tuple(np.quantile(have, (0.025, 0.975)))


def table(points: Points) -> list[dict[str, str]]:
    """One row for each predictor and loss, best within first."""
    everything = np.arange(len(points.pair))
    draws = points.resample(DRAWS)
    rows: list[dict[str, str]] = []
    for loss in LOSSES:
        sampled = {}
        for name in points.predictors:
            known: dict[int, Array] = {}
            for draw in draws:
                if id(draw) not in known:
                    known[id(draw)] = measures(points, name, loss, *draw)
            sampled[name] = np.array([known[id(draw)] for draw in draws])
        reference = measures(points, REFERENCE, loss, everything, points.direction)
        for name, values in sampled.items():
            whole = measures(points, name, loss, everything, points.direction)
            row = {"loss": loss, "predictor": name}
            lead = whole - reference
            for number, kind in enumerate(("pooled", "within", "across")):
                low, high = bounds(values[:, number])
                row |= {
                    kind: f"{whole[number]:.3f}",
                    f"{kind}_low": f"{low:.3f}",
                    f"{kind}_high": f"{high:.3f}",
                }
                low, high = bounds(values[:, number] - sampled[REFERENCE][:, number])
                row |= {
                    f"{kind}_lead": f"{lead[number]:.3f}",
                    f"{kind}_lead_low": f"{low:.3f}",
                    f"{kind}_lead_high": f"{high:.3f}",
                }
            rows.append(row)
    return sorted(rows, key=lambda row: (list(LOSSES).index(row["loss"]), -float(row["within"])))


def picture(points: Points, path: Path) -> None:
    """KL against four diagnostics, a colour for each pair."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    shown = ("calibration_r2_key", "attention_cosine", "attention_cosine_worst", "output_error")
    for axes, name in zip(figure.subplots(1, len(shown), sharey=True), shown, strict=True):
        for number, pair in enumerate(np.unique(points.pair)):
            mine = points.pair == pair
            x = points.predictors[name][mine] * (-1 if name in HIGHER_IS_BETTER else 1)
            axes.plot(x, points.loss["kl"][mine], ".", color=f"C{number}", label=pair[:20])
        axes.set_xlabel(name.replace("_", " "))
    figure.axes[0].set(ylabel="KL(native || mapped), nat a token", yscale="log")
    figure.axes[0].legend(fontsize=7, loc="lower left")
    figure.savefig(path, dpi=90, metadata={"Software": None})


def main() -> None:
    """Read, correlate, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--points", type=Path, default=RESULTS / "correlation.csv")
    parser.add_argument("--output", type=Path, default=RESULTS / "correlation_summary.csv")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--recipes", help="only these, with commas")
    given = parser.parse_args()
    points = Points(given.points, set(given.recipes.split(",")) if given.recipes else None)
    rows = table(points)
    with given.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(points.pair)} points, {len(np.unique(points.direction))} directions, "
          f"{len(np.unique(points.pair))} pairs")  # fmt: skip
    for row in rows:
        cells = [
            f"{row[k]:>6} [{row[f'{k}_low']}, {row[f'{k}_high']}]" for k in ("pooled", "within", "across")
        ]
        print(f"{row['loss']:<11}{row['predictor']:<30}" + "  ".join(f"{cell:<24}" for cell in cells))
    if given.picture:
        picture(points, given.picture)


if __name__ == "__main__":
    main()
