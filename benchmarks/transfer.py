"""Does the probe of `kvhub transfer` say what a fit will give? Against the points of `correlation_points.py`.

    python -m benchmarks.transfer --pair A B ... --text wiki.utf8 --text c4.utf8 \\
        [--points benchmarks/results/correlation.csv] --output benchmarks/results/transfer.csv

For every direction of every pair: the probe's verdict and advice from a few hundred tokens, and beside them
what fits on thousands of rows came to: the loss of `ridge`, the best plain recipe, and the loss of the
recipe nearest to the advice. Rows are appended; the summary is printed from all of them.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.correlation import spearman
from benchmarks.correlation_points import append
from kvhub.evaluation.text import held_out_windows
from kvhub.model.load import load_model
from kvhub.model.tokenizer import load_tokenizer
from kvhub.transfer.advise import Advice, advise, candidates
from kvhub.transfer.probe import probe_pair

PLAIN = {"ridge": (8, "full"), "k1": (1, "full"), "k4": (4, "full"), "kall": (0, "full"),
         "local-k4": (4, "head-local")}  # fmt: skip
"""Recipes of the points that differ in k and support alone."""


def outcomes(path: Path) -> dict[tuple[str, str], dict[str, dict[str, float]]]:
    """Loss by direction and recipe."""
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            values = {name: float(row[name]) for name in ("excess_nll", "kl", "top1")}
            found.setdefault((row["source"], row["target"]), {})[row["recipe"]] = values
    return found


def nearest(advice: Advice, layers: int, known: dict[str, dict[str, float]]) -> str:
    """The plain recipe that is most like the advice."""

    def distance(name: str) -> tuple[bool, float]:
        k, support = PLAIN[name]
        k = min(k or layers, layers)
        return support != advice.support, abs(np.log(k / advice.k))

    return min((name for name in PLAIN if name in known), key=distance)


def summary(path: Path) -> None:
    """Rank correlations of what the probe says with what was reached."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    if len(rows) < 4:
        return
    reached = np.array([float(row["best_kl"]) for row in rows])
    for name in ("context_kept", "attention_cosine", "best_r2"):
        said = -np.array([float(row[name]) for row in rows])
        print(f"{name}: Spearman with the best fit's KL {spearman(said, reached):+.2f}")
    lost = [float(row["advised_kl"]) - float(row["best_kl"]) for row in rows]
    default = [float(row["default_kl"]) - float(row["best_kl"]) for row in rows]
    print(f"KL above the best plain recipe, mean of {len(rows)} directions:")
    print(f"  as advised {np.mean(lost):.4f}, default {np.mean(default):.4f}")


def main() -> None:
    """Probe and append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pair", nargs=2, type=Path, action="append", default=[])
    parser.add_argument("--text", type=Path, action="append", default=[])
    parser.add_argument("--points", type=Path, default=Path("benchmarks/results/correlation.csv"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--prefix", type=int, default=64)
    parser.add_argument("--tail", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    torch.set_num_threads(1)
    known = outcomes(given.points)
    for pair in given.pair:
        models = {path.name: load_model(path, getattr(torch, given.dtype)) for path in pair}
        tokenizer = load_tokenizer(pair[0])
        length = given.prefix + given.tail
        # Later windows than those of the points: nothing is predicted on the tokens that it is judged by.
        domains = held_out_windows(given.text, tokenizer, count=40 * len(given.text), length=length)
        windows = torch.cat([cut[-(given.windows // len(domains)) :] for cut in domains.values()])
        for names in (tuple(models), tuple(models)[::-1]):
            if names not in known:
                continue
            source, target = (models[name] for name in names)
            shapes = source.identity.geometry, target.identity.geometry
            started = time.process_time()
            probe = probe_pair(source, target, windows, candidates(*shapes), tail=given.tail)
            found = advise(probe, shapes[0].num_kv_heads)
            plain = {name: known[names][name] for name in PLAIN if name in known[names]}
            best = min(plain, key=lambda name: plain[name]["kl"])
            near = nearest(found, shapes[0].num_layers, plain)
            default = "ridge" if "ridge" in plain else "kall"
            append(
                given.output,
                {
                    "source": names[0], "target": names[1], "tokens": probe.tokens,
                    "verdict": found.verdict, "context_kept": found.context_kept,
                    "attention_cosine": max(one.attention_cosine for one in probe.outcomes),
                    "best_r2": float(np.mean([max(row) for row in probe.scores])),
                    "k": found.k, "support": found.support, "kl_empty": probe.kl_empty,
                    "advised": near, "advised_kl": plain[near]["kl"],
                    "best": best, "best_kl": plain[best]["kl"], "best_top1": plain[best]["top1"],
                    "best_excess_nll": plain[best]["excess_nll"],
                    "default_kl": plain[default]["kl"], "cpu_seconds": time.process_time() - started,
                },
            )  # fmt: skip
            print(f"{names[0]} to {names[1]}: {found.verdict}, k = {found.k} {found.support}", flush=True)
    summary(given.output)


if __name__ == "__main__":
    main()
