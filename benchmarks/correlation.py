"""Which diagnostic leads where the loss goes? Correlations over the points of `correlation_points.py`.

    python -m benchmarks.correlation [--points benchmarks/results/correlation.csv]
    python -m benchmarks.correlation --tasks benchmarks/results/task_points.csv \\
        --output benchmarks/results/correlation_tasks.csv

Every diagnostic is compared with the loss on other windows (excess NLL; KL; top-1 lost), in three ways:

    pooled    Spearman over all points
    within    the recipes of one pair and direction: Spearman in each, averaged. Which recipe is better?
    across    one recipe, all pairs and directions: Spearman for each recipe, averaged. Will a pair work?

Diagnostics where more is better are turned round, so that +1 is a perfect predictor throughout. Intervals are
percentiles of a bootstrap over clusters: whole pairs are drawn, both directions and all recipes with them;
with few pairs they are wide. `lead` is the difference to attention-output cosine on the same
resamples.

With `--tasks` the losses are those of answers (`task_points.py`), of the points that are in both tables, and
the losses on text become predictors: accuracy lost, as a share of what native has over chance (where that is
above noise), choices that are not native's, KL over the options, margin lost. `same, other items` is the loss
on every second block of items against the loss on the rest: what a measure of half the size says of itself.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import RESULTS

Array = NDArray[np.float64]
HIGHER_IS_BETTER = {
    "attention_cosine", "attention_cosine_worst", "calibration_attention_cosine",
    "r2_key", "r2_value", "calibration_r2_key", "calibration_r2_value", "top1",
}  # fmt: skip
NOT_PREDICTORS = {"pair", "source", "target", "recipe", "excess_nll", "kl", "top1", "positions"}
REFERENCE = "attention_cosine"
LOSSES = {"excess_nll": 1.0, "kl": 1.0, "top1": -1.0}
TASK_LOSSES = {"retention_lost": 1.0, "agreement": -1.0, "option_kl": 1.0, "margin_drop": 1.0}
HALVES = "same, other items"
DRAWS = 400
Row = dict[str, str]


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


def read(path: Path, only: set[str] | None = None) -> list[Row]:
    """The points, of some recipes or all."""
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if only is None or row["recipe"] in only]


def with_tasks(rows: Sequence[Row], tasks: Sequence[Row]) -> list[Row]:
    """Points that have both, with `NAME` for all items, `even NAME` and `odd NAME` of the task losses."""
    lines = {(t["source"], t["target"], t["recipe"], t["task"]): t for t in tasks}
    found = []
    for row in rows:
        parts = {part: lines.get((row["source"], row["target"], row["recipe"], part)) for part in PARTS}
        if None not in parts.values():
            found.append(row | {f"{prefix}{name}": _of_tasks(parts[part], name)
                                for part, prefix in PARTS.items() for name in TASK_LOSSES})  # fmt: skip
    return found


PARTS = {"all": "", "even": "even ", "odd": "odd "}


def _of_tasks(line: Row | None, name: str) -> str:
    """A cell; empty where native is not above chance by two standard errors of its accuracy."""
    assert line is not None
    if name != "retention_lost":
        return line[name]
    native, chance, n = (float(line[key]) for key in ("native", "chance", "n"))
    clear = native - chance > 2 * (native * (1 - native) / n) ** 0.5
    return str(1 - float(line["floor_normalised"])) if clear else ""


def _numbers(rows: Sequence[Row], name: str) -> Array:
    return np.array([float(row[name]) if row[name] else np.nan for row in rows])


class Points:
    """The table, and the same table of resampled pairs."""

    def __init__(self, rows: Sequence[Row], tasks: bool = False) -> None:
        """tasks: whether the rows are those of `with_tasks`."""
        self.pair = np.array([row["pair"] for row in rows])
        self.direction = np.array([f"{row['source']}>{row['target']}" for row in rows])
        self.recipe = np.array([row["recipe"] for row in rows])
        losses = TASK_LOSSES if tasks else LOSSES
        ends = {f"{prefix}{name}" for prefix in PARTS.values() for name in TASK_LOSSES}
        skip = (NOT_PREDICTORS - set(LOSSES) if tasks else NOT_PREDICTORS) | ends
        self.loss = {name: sign * _numbers(rows, name) for name, sign in losses.items()}
        self.predictors = {
            name: (-1 if name in HIGHER_IS_BETTER else 1) * _numbers(rows, name)
            for name in rows[0]
            if name not in skip
        }
        self.halves = {
            name: (sign * _numbers(rows, f"even {name}"), sign * _numbers(rows, f"odd {name}"))
            for name, sign in (TASK_LOSSES.items() if tasks else ())
        }

    def names(self) -> list[str]:
        """Of everything that is compared with a loss."""
        return [*self.predictors, *([HALVES] if self.halves else [])]

    def columns(self, name: str, loss: str) -> tuple[Array, Array]:
        """(predictor, loss)."""
        return self.halves[loss] if name == HALVES else (self.predictors[name], self.loss[loss])

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
    """(pooled, within, across), over the points that have the predictor and the loss."""
    x, y = points.columns(name, loss)
    have = ~np.isnan(x[rows]) & ~np.isnan(y[rows])
    rows, copies = rows[have], copies[have]
    x, y = x[rows], y[rows]
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
    for loss in points.loss:
        sampled = {}
        for name in points.names():
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
    order = list(points.loss)
    return sorted(rows, key=lambda row: (order.index(row["loss"]), -float(row["within"])))


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
    parser.add_argument("--tasks", type=Path, help="losses of answers, from task_points.py")
    given = parser.parse_args()
    rows = read(given.points, set(given.recipes.split(",")) if given.recipes else None)
    points = Points(with_tasks(rows, read(given.tasks)) if given.tasks else rows, bool(given.tasks))
    found = table(points)
    with given.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    print(f"{len(points.pair)} points, {len(np.unique(points.direction))} directions, "
          f"{len(np.unique(points.pair))} pairs")  # fmt: skip
    for row in found:
        cells = [
            f"{row[k]:>6} [{row[f'{k}_low']}, {row[f'{k}_high']}]" for k in ("pooled", "within", "across")
        ]
        print(f"{row['loss']:<15}{row['predictor']:<30}" + "  ".join(f"{cell:<24}" for cell in cells))
    if given.picture:
        picture(points, given.picture)


if __name__ == "__main__":
    main()
