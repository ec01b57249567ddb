"""Points for `correlation.py`: pair x direction x recipe, every diagnostic beside the loss it should predict.

    python -m benchmarks.correlation_points --pair SMALL LARGE --text wiki.utf8 --text c4.utf8 \\
        --text tiny.utf8 --other code.utf8 --output benchmarks/results/correlation.csv

For each pair the moments of both directions are taken once; a recipe is then a solve. Held-out windows are
dealt out by turns: on one half the diagnostics are measured, on the other the loss (NLL over native, KL,
top-1), so that no diagnostic sees the tokens it is judged by. `calibration_r2_*` are of windows that were
fitted on, as the paper reports them. `--other` are texts no fit has seen. `--mapper NAME=DIR` adds finished
mappers of any family. Rows are appended; a point that is there already is not measured again.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.fidelity import keep
from kvhub.diagnostics.observe import Observation, observe
from kvhub.diagnostics.summary import WORST, window_values
from kvhub.diagnostics.window import WindowDiagnosis, diagnose_window
from kvhub.errors import KvhubError
from kvhub.evaluation.bootstrap import Bootstrap, ratio
from kvhub.evaluation.inject import KvRows, run
from kvhub.evaluation.metrics import compare_logits
from kvhub.evaluation.text import held_out_windows
from kvhub.fit.calibration import calibration_set, load_corpora, row_positions
from kvhub.fit.captures import CaptureStore
from kvhub.fit.moments import PairMoments
from kvhub.fit.ridge import PAPER, Regularization, Support
from kvhub.fit.selection import layer_scores, top_layers
from kvhub.fit.settings import FitSettings
from kvhub.fit.side import Side
from kvhub.fit.solve import solve_pair
from kvhub.mapper.load import load_mapper
from kvhub.model.load import LoadedModel, load_model
from kvhub.model.tokenizer import load_tokenizer
from kvhub.study.measure import AffineCandidate, Candidate, MapperCandidate

PLAIN = Regularization()


@dataclass(frozen=True)
class Recipe:
    """What a plain fit may vary. `short`: fitted on the first windows only, so that it extrapolates."""

    name: str
    k: int
    """0: all."""
    regularization: Regularization = PLAIN
    support: Support = "full"
    short: bool = False


RECIPES = [
    Recipe("paper", 8, PAPER),
    Recipe("ridge", 8),
    Recipe("k1", 1),
    Recipe("k4", 4),
    Recipe("kall", 0),
    Recipe("k4-weak", 4, Regularization(1e-6)),
    Recipe("k4-strong", 4, Regularization(3e-2)),
    Recipe("local-k4", 4, support="head-local"),
    Recipe("k4-short-weak", 4, Regularization(1e-6), short=True),
]
SHORT = 10
"""Windows of a short fit."""


@dataclass
class Judged:
    """Sums of one recipe over the windows seen so far."""

    diagnoses: list[WindowDiagnosis]
    calibration: list[WindowDiagnosis]
    probe: list[tuple[float, ...]]
    loss: list[tuple[float, ...]]
    windows: list[tuple[str, tuple[float, ...]]]
    """(text, sums) of every window."""


def take_moments(
    sides: tuple[Side, Side], windows: Sequence[Tensor], stride: int
) -> tuple[PairMoments, PairMoments]:
    """(all, of the first `SHORT` windows), of both directions."""
    shapes = [side.identity.geometry for side in sides]
    whole, short = (PairMoments.zeros(shapes[0], shapes[1], both=True) for _ in range(2))
    for number, window in enumerate(windows):
        positions = row_positions(len(window), stride, 0)
        rows = [side.capture(window).rows(positions) for side in sides]
        whole.add(rows[0], rows[1])
        if number < SHORT:
            short.add(rows[0], rows[1])
    whole.flush()
    short.flush()
    return whole, short


def candidates(
    moments: tuple[PairMoments, PairMoments], source: LoadedModel, target: LoadedModel
) -> Iterator[tuple[Recipe, Candidate]]:
    """The recipes that this direction allows; those that give the same fit are made once."""
    shapes = source.identity.geometry, target.identity.geometry
    scores = layer_scores(moments[0], *shapes)
    made = set()
    for recipe in RECIPES:
        if recipe.support == "head-local" and shapes[0].num_kv_heads != shapes[1].num_kv_heads:
            continue
        k = min(recipe.k or shapes[0].num_layers, shapes[0].num_layers)
        same = (k, recipe.regularization, recipe.support, recipe.short)
        if same in made:
            continue
        made.add(same)
        settings = FitSettings(k=k, support=recipe.support, store_dtype="float32")
        chosen = top_layers(scores, k)
        try:
            solved = solve_pair(moments[recipe.short], *shapes, chosen, recipe.regularization, settings)
        except KvhubError as error:
            print(f"  {recipe.name}: {error.message}", flush=True)
            continue
        yield recipe, AffineCandidate(solved.tensors, solved.layers, source.identity, target.identity)


def tail_sums(
    target: LoadedModel, window: Tensor, tail: int, mapped: Sequence[KvRows]
) -> list[tuple[float, ...]]:
    """(excess NLL, KL, top-1 agreement) sums and positions for each of `mapped`."""
    split = len(window) - tail
    body, labels = window[split:-1], window[split + 1 :]
    native, _ = run(target.model, window[:-1], keep=tail - 1)
    base = compare_logits(native, native, labels)
    found = []
    for rows in mapped:
        logits, _ = run(target.model, body, start=split, rows=rows)
        sums = compare_logits(native, logits, labels)
        found.append((sums.nll - base.nll, sums.kl, sums.top1, float(len(labels))))
    return found


def judge(
    source: LoadedModel,
    target: LoadedModel,
    named: Sequence[tuple[Any, Candidate]],
    domains: dict[str, Tensor],
    fitted: Sequence[Tensor],
    tail: int,
) -> list[Judged]:
    """Everything for all candidates of one direction, one window at a time."""
    kept = [Judged([], [], [], [], []) for _ in named]

    def mapped(seen: Observation) -> list[KvRows]:
        return [candidate.map(seen.source) for _, candidate in named]

    for window in fitted:
        seen = observe(source, target, window, tail)
        for judged, rows in zip(kept, mapped(seen), strict=True):
            judged.calibration.append(diagnose_window(seen, rows))
    every = [(name, window) for name, windows in domains.items() for window in windows]
    for number, (name, window) in enumerate(every):
        seen = observe(source, target, window, tail)
        rows = mapped(seen)
        sums = tail_sums(target, window, tail, rows)
        for judged, one, found in zip(kept, rows, sums, strict=True):
            judged.windows.append((name, found))
            (judged.loss if number % 2 else judged.probe).append(found)
            if number % 2 == 0:
                judged.diagnoses.append(diagnose_window(seen, one))
    return kept


def predictors(diagnoses: Sequence[WindowDiagnosis]) -> dict[str, float]:
    """Scores as `kvhub diagnose` gives them, without intervals; R2 from the errors."""
    values = [window_values(one) for one in diagnoses]
    found: dict[str, float] = {}
    for metric in values[0]:
        layers = np.stack([one[metric] for one in values]).mean(0)
        found[metric] = float(layers.mean())
        if metric in WORST:
            found[f"{metric}_worst"] = float(getattr(layers, WORST[metric])())
    for side in ("key", "value"):
        found[f"r2_{side}"] = 1 - found[f"{side}_error"]
    return found


def row(judged: Judged) -> dict[str, float]:
    """One point: loss, then what should predict it."""
    loss, probe = np.sum(judged.loss, axis=0), np.sum(judged.probe, axis=0)
    found = {"excess_nll": loss[0], "kl": loss[1], "top1": loss[2]}
    found = {name: float(value / loss[3]) for name, value in found.items()} | {"positions": float(loss[3])}
    found["probe_excess_nll"], found["probe_kl"] = float(probe[0] / probe[3]), float(probe[1] / probe[3])
    calibration = predictors(judged.calibration)
    for side in ("key", "value"):
        found[f"calibration_r2_{side}"] = calibration[f"r2_{side}"]
    found["calibration_attention_cosine"] = calibration["attention_cosine"]
    return found | predictors(judged.diagnoses)


def fidelity_lines(pair: str, judged: dict[str, Judged], other: set[str]) -> Iterator[dict[str, object]]:
    """Lines for `fidelity.csv` from the same windows, probe and loss together; what was not run stays empty.

    other: texts that were not fitted on. `removed` is the share of the paper's excess that is gone.
    """
    names = [name for name, _ in next(iter(judged.values())).windows]
    excess = {recipe: np.array([found[0] for _, found in one.windows]) for recipe, one in judged.items()}
    counts = np.array([found[3] for _, found in next(iter(judged.values())).windows])
    labels = {"all": [n not in other for n in names], "other": [n in other for n in names]}
    for label, chosen in labels.items():
        mask = np.array(chosen)
        strata = [names[i] for i in np.flatnonzero(mask)]
        if not strata:
            continue
        draws = Bootstrap([strata.count(name) for name in dict.fromkeys(strata)])
        for recipe, one in judged.items():
            mine, n = excess[recipe][mask], counts[mask]
            whole = draws.estimate(lambda w, x=mine, n=n: ratio(w, x, n))  # type: ignore[misc]
            sums = np.array([found for _, found in one.windows])[mask].sum(0)
            line: dict[str, object] = {"pair": pair, "recipe": recipe, "domain": label}
            line |= {"excess_nll": whole.value, "low": whole.low, "high": whole.high}
            line |= {"kl": float(sums[1] / sums[3]), "top1": float(sums[2] / sums[3])}
            if "paper" in judged:
                theirs = excess["paper"][mask]
                gone = draws.estimate(lambda w, x=mine, y=theirs: 1 - (w @ x) / (w @ y))  # type: ignore[misc]
                line |= {"removed": gone.value, "removed_low": gone.low, "removed_high": gone.high}
            line |= {"windows": int(mask.sum()), "n": int(sums[3])}
            yield line


def main() -> None:
    """Measure and append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pair", nargs=2, type=Path, action="append", required=True)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--other", type=Path, action="append", default=[])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--mapper", action="append", default=[], help="NAME=DIR, of the pair's first direction"
    )
    parser.add_argument("--sequences", type=int, default=60)
    parser.add_argument("--length", type=int, default=256, help="of calibration windows")
    parser.add_argument("--stride", type=int, default=2)
    parser.add_argument("--prefix", type=int, default=192)
    parser.add_argument("--tail", type=int, default=64)
    parser.add_argument("--windows", type=int, default=6, help="held-out windows a text")
    parser.add_argument("--captures", type=Path)
    parser.add_argument("--fidelity", type=Path, help="also lines for this table of `fidelity.py`")
    parser.add_argument("--turn", type=int, action="append", choices=[0, 1], help="one direction only")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    torch.set_num_threads(1)
    done = set()
    if given.output.exists():
        with given.output.open() as file:
            done = {(one["source"], one["target"], one["recipe"]) for one in csv.DictReader(file)}
    for paths in given.pair:
        started = time.monotonic()
        models = [load_model(path, getattr(torch, given.dtype)) for path in paths]
        tokenizer = load_tokenizer(paths[0])
        corpora = load_corpora(given.text, tokenizer=tokenizer)
        windows = calibration_set(corpora, tokenizer, sequences=given.sequences, length=given.length)
        texts = [*given.text, *given.other]
        length = given.prefix + given.tail
        domains = held_out_windows(texts, tokenizer, count=given.windows * len(texts), length=length)
        stores = [given.captures and CaptureStore(given.captures, model.identity) for model in models]
        sides = tuple(Side.of(model, store) for model, store in zip(models, stores, strict=True))
        moments = take_moments((sides[0], sides[1]), list(windows.fit), given.stride)
        print(f"{paths[0].name}, {paths[1].name}: moments {time.monotonic() - started:.0f} s", flush=True)
        fitted = [window[:length] for window in windows.fit[:2]]
        for turn in given.turn or (0, 1):
            source, target = models[turn], models[1 - turn]
            sums = moments if turn == 0 else (moments[0].reversed(), moments[1].reversed())
            named: list[tuple[str, Candidate]] = [
                (recipe.name, found) for recipe, found in candidates(sums, source, target)
            ]
            for entry in given.mapper:
                name, _, directory = entry.partition("=")
                mapper = load_mapper(Path(directory))
                if mapper.manifest.source.digest == source.identity.digest:
                    named.append((name, MapperCandidate(mapper)))
            key = paths[turn].name, paths[1 - turn].name
            named = [one for one in named if (*key, one[0]) not in done]
            found_all = judge(source, target, named, domains, fitted, given.tail)
            if given.fidelity:
                table = {name: judged for (name, _), judged in zip(named, found_all, strict=True)}
                others = {path.stem for path in given.other}
                keep(given.fidelity, list(fidelity_lines("->".join(key), table, others)))
            for (name, _), judged in zip(named, found_all, strict=True):
                about = {
                    "pair": "+".join(sorted(path.name for path in paths)),
                    "source": key[0],
                    "target": key[1],
                }
                append(given.output, about | {"recipe": name} | row(judged))
            print(
                f"  {key[0]} to {key[1]}: {len(named)} points, {time.monotonic() - started:.0f} s", flush=True
            )


def append(path: Path, values: dict[str, Any]) -> None:
    """One line of the table, with a head where it is the first; what was not measured stays empty."""
    names = list(values)
    if path.exists():
        with path.open(newline="") as file:
            names = next(csv.reader(file))
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=names, restval="", lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(
            {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in values.items()}
        )


if __name__ == "__main__":
    main()
