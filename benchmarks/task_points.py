"""Task retention of many mappers of one pair, for `correlation.py`; what no mapper changes is run once.

    python -m benchmarks.task_points SMALL LARGE --task letters:arc=arc.jsonl --task next:wiki=wiki.txt \\
        --mapper NAME=DIR --mapper NAME=FILE.pt --record DIR --output benchmarks/results/task_points.csv

Both models first leave their rows of every context, and their own answers, in DIR (`task_record.py`), one
model in memory at a time. A mapper then costs its map of the recorded rows, the last context token and the
answers, which DIR keeps under its name. Mappers of either direction are artifacts, saved `{"tensors",
"layers"}` as `kvhub.fit.solve` makes them, or with `--text` the plain recipes of `correlation_points.py`,
solved here. Lines are appended as they come; a mapper that is there is not measured again. Items come in
blocks after the same examples; intervals (95 %) resample whole blocks, native and mapped alike.

    floor_normalised  (mapped - chance) / (native - chance); undefined where native is not above chance
    agreement         choices that are native's
    margin_drop       log-likelihood over length, the right option less the best wrong one: native - mapped
    option_kl         KL of native's and mapped's distribution over the options

Lines `even` and `odd` are of every second block of all tasks, `all` of all: items count alike.
`wrong_document` is accuracy on the mapped rows of another block's item, for the recipes of `--wrong`.
"""

from __future__ import annotations

import argparse
import csv
import gc
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.correlation_points import append, candidates, take_moments
from benchmarks.correlation_recorded import read_candidate
from benchmarks.task_items import TaskSet, parse
from benchmarks.task_record import Records
from kvhub.errors import Incompatible
from kvhub.evaluation.bootstrap import Array, Bootstrap, Estimate, ratio
from kvhub.fit.calibration import calibration_set, load_corpora
from kvhub.fit.side import Side
from kvhub.model.identify import identify
from kvhub.model.identity import ModelIdentity
from kvhub.model.load import LoadedModel, load_model
from kvhub.model.tokenizer import load_tokenizer
from kvhub.study.measure import Candidate

Scores = list[Array]
"""Log-likelihood of every answer, `[options]` for each item."""


@dataclass(frozen=True)
class Answered:
    """One task on every arm; `wrong` may be missing."""

    task: TaskSet
    native: Scores
    source: Scores
    empty: Scores
    mapped: Scores
    wrong: Scores | None = None

    def values(self) -> dict[str, Array]:
        """`[items]` of everything that is averaged."""
        items = self.task.items
        gold = np.array([item.gold for item in items])
        arms = {
            "native": self.native,
            "source_alone": self.source,
            "empty": self.empty,
            "mapped": self.mapped,
        }
        if self.wrong is not None:
            arms["wrong_document"] = self.wrong
        normed = {
            arm: [found / item.lengths for found, item in zip(scores, items, strict=True)]
            for arm, scores in arms.items()
        }
        chosen = {arm: np.array([int(one.argmax()) for one in scores]) for arm, scores in normed.items()}
        found = {arm: (choice == gold).astype(float) for arm, choice in chosen.items()}
        margins = {
            arm: np.array(
                [one[g] - np.delete(one, g).max() for one, g in zip(normed[arm], gold, strict=True)]
            )
            for arm in ("native", "mapped")
        }
        found["chance"] = np.array([1 / len(item.answers) for item in items])
        found["agreement"] = (chosen["mapped"] == chosen["native"]).astype(float)
        found["margin_drop"] = margins["native"] - margins["mapped"]
        found["option_kl"] = np.array([_kl(p, q) for p, q in zip(self.native, self.mapped, strict=True)])
        return found


def _margin(scores: Array, gold: int) -> float:
    return float(scores[gold] - np.delete(scores, gold).max())


def _kl(native: Array, mapped: Array) -> float:
    p, q = (scores - np.logaddexp.reduce(scores) for scores in (native, mapped))
    return float((np.exp(p) * (p - q)).sum())


def summarize(answered: Sequence[Answered], part: str = "all") -> dict[str, float]:
    """One line over tasks; part: `all`, or `even` or `odd` blocks of each."""
    sums: dict[str, list[float]] = {}
    counts, strata = [], []
    for one in answered:
        values, start, used = one.values(), 0, 0
        for number, block in enumerate(one.task.blocks):
            stop = start + len(block.items)
            if part == "all" or (number % 2 == 0) == (part == "even"):
                for name, of_items in values.items():
                    sums.setdefault(name, []).append(float(of_items[start:stop].sum()))
                counts.append(stop - start)
                used += 1
            start = stop
        strata.append(used)
    totals, n = {name: np.array(value) for name, value in sums.items()}, np.array(counts, dtype=float)
    draw = Bootstrap(strata)
    found: dict[str, float] = {"n": float(n.sum())}
    for name in ("chance", "native", "source_alone", "empty", "wrong_document"):
        if len(totals.get(name, ())) == len(n):
            found[name] = float(totals[name].sum() / n.sum())
    found |= _cells("mapped", draw.estimate(lambda w: ratio(w, totals["mapped"], n)))
    loss = totals["native"] - totals["mapped"]
    found |= _cells("loss", draw.estimate(lambda w: ratio(w, loss, n)))
    found |= _cells("retention", draw.estimate(lambda w: _share(w, totals["mapped"], totals["native"])))
    over = totals["mapped"] - totals["chance"], totals["native"] - totals["chance"]
    found |= _cells("floor_normalised", draw.estimate(lambda w: _share(w, *over)))
    for name in ("agreement", "margin_drop", "option_kl"):
        found |= _cells(name, draw.estimate(lambda w, name=name: ratio(w, totals[name], n)))  # type: ignore[misc]
    return found


def _share(weights: Array, part: Array, whole: Array) -> Array:
    """NaN where the whole is not above 0: where native is no better than guessing nothing is retained."""
    top, bottom = weights @ part, weights @ whole
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Array = np.where(bottom > 0, top / bottom, np.nan)
    return found


def _cells(name: str, value: Estimate) -> dict[str, float]:
    return {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}


@dataclass(frozen=True)
class Pair:
    """Both models on disk, and what they left."""

    paths: tuple[Path, Path]
    identities: tuple[ModelIdentity, ModelIdentity]
    dtype: torch.dtype
    records: Records

    @property
    def name(self) -> str:
        """The same for both directions."""
        return "+".join(sorted(path.name for path in self.paths))

    def load(self, side: int) -> LoadedModel:
        """One of the models."""
        return load_model(self.paths[side], self.dtype)

    def record(self, tasks: Sequence[TaskSet]) -> None:
        """Rows and own answers of both, one model after the other."""
        for side, path in enumerate(self.paths):
            if all(self.records.complete(self.identities[side], task) for task in tasks):
                continue
            model = self.load(side)
            for task in tasks:
                began = time.monotonic()
                self.records.record(model, task)
                print(f"{path.name}, {task.name}: recorded in {time.monotonic() - began:.0f} s", flush=True)
            del model
            gc.collect()


def finished(pair: Pair, turn: int, entries: Sequence[str]) -> Iterator[tuple[str, Candidate]]:
    """The given mappers that map this direction."""
    for entry in entries:
        name, _, place = entry.partition("=")
        try:
            found, _, exact = read_candidate(Path(place), pair.identities[turn], pair.identities[1 - turn])
        except Incompatible:
            continue
        if exact == 0:  # what it leaves out would have to be native here
            yield name, found


def solved(pair: Pair, turn: int, texts: Sequence[Path]) -> list[tuple[str, Candidate]]:
    """The plain recipes of `correlation_points.py`, from the same windows."""
    models = pair.load(0), pair.load(1)
    tokenizer = models[0].tokenizer
    windows = calibration_set(load_corpora(texts, tokenizer=tokenizer), tokenizer, sequences=60, length=256)
    moments = take_moments((Side.of(models[0]), Side.of(models[1])), list(windows.fit), 2)
    sums = moments if turn == 0 else (moments[0].reversed(), moments[1].reversed())
    return [(recipe.name, found) for recipe, found in candidates(sums, models[turn], models[1 - turn])]


def run_direction(
    pair: Pair,
    turn: int,
    tasks: Sequence[TaskSet],
    named: Sequence[tuple[str, Candidate]],
    wrong: Sequence[str],
    output: Path,
) -> None:
    """Every mapper of one direction on every task; lines are written mapper by mapper."""
    source, target = pair.identities[turn], pair.load(1 - turn)
    records = pair.records
    own = [records.answers(source, task) for task in tasks]
    native = [records.answers(target.identity, task) for task in tasks]
    empty = [records.empty(target, task) for task in tasks]
    names = pair.paths[turn].name, pair.paths[1 - turn].name
    for name, candidate in named:
        began = time.monotonic()
        answered = []
        for i, task in enumerate(tasks):
            mapped = records.mapped(candidate, source, target, task, key=name)
            other = None
            if name in wrong:
                other = records.mapped(candidate, source, target, task, key=name, wrong=True)
            answered.append(Answered(task, native[i], own[i], empty[i], mapped, other))
        about = {"pair": pair.name, "source": names[0], "target": names[1], "recipe": name}
        lines = {one.task.name: summarize([one]) for one in answered}
        lines |= {part: summarize(answered, part) for part in ("all", "even", "odd")}
        for task_name, line in lines.items():
            append(output, about | {"task": task_name} | {"wrong_document": ""} | line)
        told = " ".join(f"{key} {lines['all'][key]:.3f}" for key in ("native", "mapped", "agreement"))
        print(f"  {names[0]} to {names[1]}, {name}: {told}, {time.monotonic() - began:.0f} s", flush=True)


def _done(output: Path) -> set[tuple[str, str, str]]:
    if not output.exists():
        return set()
    with output.open(newline="") as file:
        return {(row["source"], row["target"], row["recipe"]) for row in csv.DictReader(file)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, measure, append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs=2, type=Path, metavar="MODEL")
    parser.add_argument("--task", action="append", required=True, help="FORM:NAME=FILE (task_items.py)")
    parser.add_argument("--items", type=int, default=100, help="of each task")
    parser.add_argument("--block", type=int, default=5, help="items that share examples")
    parser.add_argument("--blocks", type=int, help="only the first blocks of each task")
    parser.add_argument("--shots", type=int, default=4, help="examples")
    parser.add_argument("--prefix", type=int, default=192, help="tokens before a continuation (form next)")
    parser.add_argument("--mapper", action="append", default=[], help="NAME=DIR or NAME=FILE.pt")
    parser.add_argument(
        "--text", type=Path, action="append", default=[], help="solve the plain recipes on these"
    )
    parser.add_argument(
        "--wrong", action="append", default=[], metavar="NAME", help="also on another context"
    )
    parser.add_argument("--turn", type=int, action="append", choices=[0, 1], help="order of directions")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    paths = given.models[0], given.models[1]
    identities = identify(paths[0], dtype=given.dtype), identify(paths[1], dtype=given.dtype)
    pair = Pair(paths, identities, getattr(torch, given.dtype), Records(given.record))
    tokenizer = load_tokenizer(paths[0])
    size = {"items": given.items, "block": given.block, "shots": given.shots, "prefix": given.prefix}
    whole = [parse(text, tokenizer, **size) for text in given.task]
    tasks = [replace(task, blocks=task.blocks[: given.blocks]) for task in whole]
    pair.record(tasks)
    for turn in given.turn or (0, 1):
        named = list(finished(pair, turn, given.mapper))
        named += solved(pair, turn, given.text) if given.text else []
        done = _done(given.output)
        key = paths[turn].name, paths[1 - turn].name
        named = [one for one in named if (*key, one[0]) not in done]
        run_direction(pair, turn, tasks, named, given.wrong, given.output)


if __name__ == "__main__":
    main()
