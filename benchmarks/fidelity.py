"""What recipes of a fit are worth: one protocol over any pair.

    python -m benchmarks.fidelity SOURCE TARGET --text wiki.utf8 --text c4.utf8 --text code.utf8 \
        --other technical.utf8 --captures DIR [--both] [--recipes paper,ridge,...] \
        [--mapper NAME=DIR] [--exact-prefix N] [--name PAIR] [--output benchmarks/results/fidelity.csv]

Both models run once over the calibration windows and over the held-out ones, and are kept in DIR; a recipe is
then a solve and two short tails a window (its own document's cache and another's). All recipes of a pair see
the same tokens. A line is one recipe on `all` held-out windows of the texts that were fitted on, on each one,
and on those that were not fitted on (`other`); lines that are there already are replaced. `default` is what
`kvhub fit` does unasked, its gradient steps included; `default-stretched` the same with keys that do not go
through the k_norm that the target has. `removed` is the share of the paper's excess that is gone, paired over
windows, where that excess is above 0 beyond chance. What was run, on what and where is kept beside the lines
(`fidelity.json`), a pair at a time. The same input gives the same numbers: nothing is drawn but from fixed
seeds.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import RESULTS, describe
from benchmarks.study_pair import add_arguments, directions
from kvhub.errors import KvhubError
from kvhub.study.measure import ArmScores, MapperCandidate, measure
from kvhub.study.pair import StudyPair
from kvhub.study.recipes import RECIPES, apply_flops, fit, named, stored_bytes

COLUMNS = (
    "pair", "recipe", "domain", "excess_nll", "low", "high", "removed", "removed_low", "removed_high",
    "kl", "kl_low", "kl_high", "top1", "cosine", "cosine_worst", "gap_recovered", "gap_low", "gap_high",
    "wrong_document", "source", "empty", "empty_kl", "native_nll", "k", "exact_prefix", "bytes",
    "apply_flops", "fit_seconds", "windows", "n",
)  # fmt: skip


EXCLUDED = (
    "fit_seconds: the forwards, their captures and the moments, which all recipes share; a loaded machine",
    "apply_flops: the rotations",
    "bytes: of a mapper given with --mapper its files, else its tensors",
    "score positions: the first token of every tail",
)


@dataclass(frozen=True)
class Cost:
    """What a recipe costs; None: not measured."""

    k: int
    exact_prefix: int
    stored: int
    flops: int
    seconds: float | None


def lines(
    pair: str, recipe: str, scores: ArmScores, paper: ArmScores | None, cost: Cost, fitted: list[str]
) -> list[dict[str, object]]:
    """All lines of one recipe. fitted: the texts that were fitted on; the others count as `other`."""
    found, before = [], paper.parts(fitted) if paper is not None else {}
    for label, mine in scores.parts(fitted).items():
        wrong = all("wrong-document" in w.sums for ws in mine.results.values() for w in ws)
        line: dict[str, object] = {"pair": pair, "recipe": recipe, "domain": label}
        line["excess_nll"] = mine.excess()
        estimates = {"": mine.over_native("nll"), "kl_": mine.over_native("kl"), "gap_": mine.gap()}
        for prefix, estimate in estimates.items():
            line[f"{prefix}low"], line[f"{prefix}high"] = estimate.low, estimate.high
        line["gap_recovered"] = estimates["gap_"].value
        # Where the paper loses nothing there is no loss to share.
        if label in before and (recipe == "paper" or before[label].over_native().low > 0):
            removed = mine.share_removed(before[label])
            line |= {"removed": removed.value, "removed_low": removed.low, "removed_high": removed.high}
        cosine = mine.cosine()
        line |= {
            "kl": mine.mean("mapped", "kl"),
            "top1": mine.mean("mapped", "top1"),
            "cosine": float(cosine.mean()),
            "cosine_worst": float(cosine.min()),
            "wrong_document": mine.excess(arm="wrong-document") if wrong else None,
            "source": mine.excess(arm="source"),
            "empty": mine.excess(arm="empty"),
            "empty_kl": mine.mean("empty", "kl"),
            "native_nll": mine.mean("native"),
            "k": cost.k,
            "exact_prefix": cost.exact_prefix,
            "bytes": cost.stored,
            "apply_flops": cost.flops,
            "fit_seconds": cost.seconds,
            "windows": sum(len(ws) for ws in mine.results.values()),
            "n": int(mine.positions().sum()),
        }
        found.append(line)
    return found


def keep(path: Path, new: list[dict[str, object]]) -> None:
    """Put lines into a CSV file, in the place of those of the same pair, recipe and domain."""
    lines = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    fresh = {(line["pair"], line["recipe"], line["domain"]) for line in new}
    kept = [line for line in lines if (line["pair"], line["recipe"], line["domain"]) not in fresh]
    shown = [{name: _cell(line.get(name)) for name in COLUMNS} for line in new]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows([*kept, *shown])


def _cell(value: object) -> str:
    if value is None or value != value:  # no number: NaN
        return ""
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def about(pair: StudyPair, given: argparse.Namespace) -> dict[str, object]:
    """Where and on what a pair was measured."""
    texts = [(path, True) for path in given.text] + [(path, False) for path in given.other]
    settings = pair.settings
    return {
        "machine": describe(),
        "dtype": pair.source.identity.dtype,
        "source": {"name": pair.source.identity.name, "digest": pair.source.identity.digest},
        "target": {"name": pair.target.identity.name, "digest": pair.target.identity.digest},
        "texts": [
            {"name": path.stem, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "fitted_on": fitted}
            for path, fitted in texts
        ],
        "calibration": {"k": settings.k, "windows": len(pair.windows()), "length": settings.length,
                        "stride": settings.stride},
        "held_out": {name: len(windows) for name, windows in pair.text.held_out.items()},
        "tuning": {name: len(windows) for name, windows in pair.text.tuning.items()},
        "prefix": given.prefix,
        "tail": given.tail,
    }  # fmt: skip


def note(path: Path, pair: str, entry: dict[str, object]) -> None:
    """Keep what is said of one pair beside the lines, in the place of what was there."""
    known = json.loads(path.read_bytes()) if path.exists() else {}
    pairs = known.get("pairs", {}) | {pair: entry}
    whole = {"columns": COLUMNS, "excluded": EXCLUDED, "pairs": dict(sorted(pairs.items()))}
    path.write_text(json.dumps(whole, indent=1) + "\n")


def one_way(pair: StudyPair, name: str, given: argparse.Namespace) -> None:
    """All recipes of one direction, each written as soon as it is measured."""
    from kvhub.mapper.load import load_mapper

    fitted = list(pair.text.fit)
    bundle = pair.bundle()
    paper: ArmScores | None = None
    entry = about(pair, given)
    left_out: dict[str, str] = {}

    def done(recipe: str, scores: ArmScores, cost: Cost) -> None:
        found = lines(name, recipe, scores, paper, cost, fitted)
        keep(given.output, found)
        print(f"{name} {recipe}: excess {found[0]['excess_nll']:.4f} KL {found[0]['kl']:.4f}", flush=True)

    for wanted in filter(None, given.recipes.split(",")):
        recipe = named(wanted)
        try:
            solved, seconds = fit(pair, recipe)
        except KvhubError as error:
            print(f"{name} {wanted}: left out: {error.message}", flush=True)
            left_out[wanted] = error.message
            continue
        scores = pair.measure(pair.candidate(solved), exact_prefix=recipe.exact_prefix, wrong=not given.short)
        if wanted == "paper":
            paper = scores
        cost = Cost(
            len(solved.layers[0]), recipe.exact_prefix, stored_bytes(solved), apply_flops(solved), seconds
        )
        done(wanted, scores, cost)
    for stored in given.mapper:
        label, _, path = stored.partition("=")
        mapper = load_mapper(path)
        manifest = mapper.manifest
        if (manifest.source.digest, manifest.target.digest) == (bundle.source.digest, bundle.target.digest):
            exact = max(manifest.exact_prefix, given.exact_prefix)
            scores = measure(
                MapperCandidate(mapper), bundle, pair.target, exact_prefix=exact, wrong=not given.short
            )
            size = sum(f.size for f in manifest.files)
            done(label, scores, Cost(manifest.k, exact, size, size, None))
    note(given.output.with_suffix(".json"), name, entry | {"left_out": left_out})


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--recipes", default=",".join(recipe.name for recipe in RECIPES), help='"": none')
    parser.add_argument("--mapper", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--exact-prefix", type=int, default=0, help="first tokens native under --mapper")
    parser.add_argument("--short", action="store_true", help="without the wrong-document arm")
    parser.add_argument("--output", type=Path, default=RESULTS / "fidelity.csv")
    given = parser.parse_args(argv)

    for pair, name in directions(given):
        one_way(pair, name, given)


if __name__ == "__main__":
    sys.exit(main())
