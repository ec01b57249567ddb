"""Does the probe of `kvhub transfer` say what a fit will give? Against the fits of `fidelity.py`.

    python -m benchmarks.transfer SOURCE TARGET --name 'small->large' --text wiki.utf8 --text c4.utf8 \
        --text code.utf8 [--reached benchmarks/results/fidelity.csv] [--output FILE]

Both directions of a pair that is in `--reached`: the probe's verdict and advice from a few hundred tokens,
and beside them what fits on thousands of rows came to on held-out text. The probe reads the last windows of
the held-out side: nothing is predicted on tokens that it is judged by. A direction's line replaces an earlier
one. After it (or with no pair) the summary over all lines is written beside them: rank correlation of what is
said with what is reached over directions, with intervals by drawing whole pairs (`transfer.json`). Not in
`cpu_seconds`: loading the models.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from benchmarks.correlation import spearman
from benchmarks.machine import RESULTS, describe
from kvhub.evaluation.evidence import ALL
from kvhub.transfer.advise import Advice
from kvhub.transfer.probe import Probe

Fits = dict[str, dict[str, float]]
"""Numbers of a direction's fits, by recipe."""
PLAIN: dict[str, tuple[int | None, str]] = {
    "ridge": (None, "full"),
    "paper": (None, "full"),
    "paper-k1": (1, "full"),
    "ridge-all": (0, "full"),
    "paper-all": (0, "full"),
    "head-local": (None, "head-local"),
}
"""Recipes that differ in k and support alone (and slightly in lambda): k; 0: all; None: as its line says."""
SAID = ("context_kept", "probe_kl", "attention_cosine", "residual_error", "best_r2")
LESS_IS_BETTER = {"probe_kl", "residual_error"}
REACHED = ("ridge_kept", "default_kept", "ridge_kl", "default_kl")
DRAWS = 2000


def reached(path: Path) -> dict[str, Fits]:
    """What fits came to on the texts that were fitted on, by direction and recipe."""
    names = ("kl", "excess_nll", "empty", "empty_kl", "k", "top1")
    found: dict[str, Fits] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            if line["domain"] == ALL and all(line[name] for name in names):
                values = {name: float(line[name]) for name in names}
                found.setdefault(line["pair"], {})[line["recipe"]] = values
    return found


def candidate(recipe: str, fits: Fits) -> tuple[int, str]:
    """(k, support) of a plain recipe."""
    k, support = PLAIN[recipe]
    return k or int(fits[recipe]["k"]), support


def nearest(k: int, support: str, fits: Fits) -> str:
    """The plain recipe that is most like (k, support)."""

    def distance(recipe: str) -> tuple[bool, float]:
        other = candidate(recipe, fits)
        return other[1] != support, abs(np.log(other[0] / k))

    return min((name for name in PLAIN if name in fits), key=distance)


def within(probe: Probe, fits: Fits) -> float:
    """Rank correlation of the probe's KL of the plain recipes' candidates with their fits' KL."""
    said, came = [], []
    for recipe in (name for name in PLAIN if name in fits and name not in ("paper", "paper-all")):
        k, support = candidate(recipe, fits)
        close = [one for one in probe.outcomes if one.support == support]
        if close:
            said.append(min(close, key=lambda one: abs(np.log(one.k / k))).kl)
            came.append(fits[recipe]["kl"])
    return spearman(np.array(said), np.array(came)) if len(said) > 2 else float("nan")


def line_of(name: str, found: Advice, fits: Fits, seconds: float) -> dict[str, object]:
    """What was said of one direction, and what came of it."""
    probe = found.probe
    plain = [recipe for recipe in PLAIN if recipe in fits]
    best = min(plain, key=lambda recipe: fits[recipe]["kl"])
    near = nearest(found.k, found.support, fits)
    line: dict[str, object] = {
        "pair": name, "tokens": probe.tokens, "verdict": found.verdict, "context_kept": found.context_kept,
        "probe_kl": min(one.kl for one in probe.outcomes),
        "attention_cosine": max(one.attention_cosine for one in probe.outcomes),
        "residual_error": min(one.residual_error for one in probe.outcomes),
        "best_r2": float(np.mean([max(row) for row in probe.scores])),
        "k": found.k, "support": found.support, "within": within(probe, fits),
        "advised": near, "advised_kl": fits[near]["kl"], "best": best, "best_kl": fits[best]["kl"],
    }  # fmt: skip
    for recipe in ("ridge", "default"):
        if recipe in fits:
            one = fits[recipe]
            line |= {f"{recipe}_kl": one["kl"], f"{recipe}_excess_nll": one["excess_nll"]}
            line[f"{recipe}_kept"] = 1 - one["kl"] / one["empty_kl"]
    return line | {"cpu_seconds": seconds}


COLUMNS = (
    "pair", "tokens", "verdict", "context_kept", "probe_kl", "attention_cosine", "residual_error", "best_r2",
    "k", "support", "within", "advised", "advised_kl", "best", "best_kl", "ridge_kl", "ridge_excess_nll",
    "ridge_kept", "default_kl", "default_excess_nll", "default_kept", "cpu_seconds",
)  # fmt: skip


def keep(path: Path, new: dict[str, object]) -> None:
    """Put a line into the file, in the place of that of the same direction."""
    lines = [line for line in read(path) if line["pair"] != new["pair"]]
    shown = {name: f"{v:.5g}" if isinstance(v, float) else v for name, v in new.items() if v == v}
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows([*lines, shown])


def read(path: Path) -> list[dict[str, str]]:
    """The lines that are there."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def clusters(lines: Iterable[dict[str, str]]) -> list[list[dict[str, str]]]:
    """Lines by pair, both directions together."""
    found: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for line in lines:
        found.setdefault(tuple(sorted(line["pair"].split("->"))), []).append(line)
    return list(found.values())


def estimate(groups: list[list[dict[str, str]]], said: str, came: str) -> dict[str, object]:
    """Spearman over all directions, +1 a perfect predictor, and its 95 % interval by drawing whole pairs."""
    turn = (-1.0 if said in LESS_IS_BETTER else 1.0) * (-1.0 if came.endswith("kl") else 1.0)
    usable = [[one for one in group if one[said] and one[came]] for group in groups]
    usable = [group for group in usable if group]

    def of(drawn: Iterable[list[dict[str, str]]]) -> float:
        pairs = np.array([[float(one[said]), float(one[came])] for group in drawn for one in group])
        return turn * spearman(pairs[:, 0], pairs[:, 1])

    draw = np.random.default_rng(0)
    values = []
    for _ in range(DRAWS):
        values.append(of([usable[at] for at in draw.integers(0, len(usable), len(usable))]))
    low, high = np.nanquantile(values, (0.025, 0.975))
    count = sum(map(len, usable))
    return {"spearman": of(usable), "low": float(low), "high": float(high),
            "directions": count, "pairs": len(usable)}  # fmt: skip


def summary(path: Path) -> None:
    """Write and print what all lines together say."""
    lines = read(path)
    groups = clusters(lines)
    if len(groups) < 3:
        return
    ranked = {f"{said}, {came}": estimate(groups, said, came) for said in SAID for came in REACHED}
    numbers = {
        "advised_above_best_kl": [float(one["advised_kl"]) - float(one["best_kl"]) for one in lines],
        "ridge_above_best_kl": [
            float(one["ridge_kl"]) - float(one["best_kl"]) for one in lines if one["ridge_kl"]
        ],
        "within": [float(one["within"]) for one in lines if one["within"]],
    }
    means = {name: {"mean": float(np.mean(v)), "n": len(v)} for name, v in numbers.items()}
    verdicts = {
        verdict: [
            float(one["ridge_kept"]) for one in lines if one["verdict"] == verdict and one["ridge_kept"]
        ]
        for verdict in ("likely", "doubtful", "unlikely")
    }
    whole = {"machine": describe(), "excluded": ["loading the models"], "rank_correlation": ranked,
             "means": means, "ridge_kept_by_verdict": verdicts}  # fmt: skip
    path.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    for name, one in ranked.items():
        print(f"{name}: {one['spearman']:+.2f} [{one['low']:+.2f}, {one['high']:+.2f}]")
    print(json.dumps(means), json.dumps(verdicts))


def main(argv: list[str] | None = None) -> None:
    """Probe and keep; then sum up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pair", nargs="*", metavar="SOURCE TARGET")
    parser.add_argument("--name", help="of the pair in --reached; reversed for the way back")
    parser.add_argument("--text", type=Path, action="append", default=[])
    parser.add_argument("--reached", type=Path, default=RESULTS / "fidelity.csv")
    parser.add_argument("--output", type=Path, default=RESULTS / "transfer.csv")
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--prefix", type=int, default=96)
    parser.add_argument("--tail", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args(argv)
    if given.pair:
        probe_both(given)
    summary(given.output)


def probe_both(given: argparse.Namespace) -> None:
    """Both directions of one pair, those that are in `--reached`."""
    import torch
    from transformers.utils import logging

    from kvhub.evaluation.text import held_out_windows
    from kvhub.model.load import load_model
    from kvhub.transfer.advise import advise, candidates
    from kvhub.transfer.probe import probe_pair

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    known = reached(given.reached)
    one, two = (load_model(path, getattr(torch, given.dtype)) for path in given.pair)
    domains = held_out_windows(
        given.text, one.tokenizer, count=40 * len(given.text), length=given.prefix + given.tail
    )
    windows = torch.cat([cut[-(given.windows // len(domains)) :] for cut in domains.values()])
    names = given.name.split("->")
    for source, target, label in ((one, two, names), (two, one, names[::-1])):
        name = "->".join(label)
        if name not in known:
            continue
        shapes = source.identity.geometry, target.identity.geometry
        began = time.process_time()
        probe = probe_pair(source, target, windows, candidates(*shapes), tail=given.tail)
        found = advise(probe, shapes[0].num_kv_heads)
        keep(given.output, line_of(name, found, known[name], time.process_time() - began))
        print(f"{name}: {found.verdict}, k = {found.k} {found.support}", flush=True)


if __name__ == "__main__":
    main()
