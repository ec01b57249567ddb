"""Ideas for a better closed form, each against recipe `closed-form`, on windows to choose on.

    python -m benchmarks.trials SOURCE TARGET --text wiki.utf8 --text c4.utf8 --text code.utf8 \
        --captures DIR [--both] [--only weights,pooled] [--name PAIR] [--output benchmarks/results/trials.csv]

All trials of a pair see the same calibration windows, every token, and are stretched as that one is (its
sink weight included). Tuning windows, of the calibration side and not fitted on, are split: a trial that
chooses does so on the even ones, all are judged on the odd ones. Nothing here looks at held-out text. A line
is one trial: KL, excess NLL, cosine, and what changed against `closed-form`, paired over windows. The fits
themselves are in `trial_fits.py`. Not measured: time.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.machine import RESULTS
from benchmarks.study_pair import add_arguments, directions
from benchmarks.trial_fits import Side, Solution, Together
from kvhub.evaluation.inject import KvRows
from kvhub.evaluation.metrics import attention_cosines
from kvhub.model.identity import ModelIdentity
from kvhub.model.rope import rotary_table
from kvhub.study.bundle import Bundle
from kvhub.study.measure import ArmScores, measure
from kvhub.study.pair import StudyPair
from kvhub_kernels.normalise import normalise
from kvhub_kernels.rotary import apply_rope, strip_rope

KINDS = ("weights", "pooled", "k-norm", "own-layers", "by-layer")


@dataclass(frozen=True)
class Mapping:
    """A trial as a candidate: keys and values may read other layers, and keys be normalised afterwards."""

    sides: tuple[list[Side], list[Side]]
    """(K, V) by target layer."""
    source: ModelIdentity
    target: ModelIdentity
    norms: list[torch.Tensor] | None = None
    """Weights of the target's k_norm, where mapped keys go through it."""

    def map(self, rows: KvRows) -> KvRows:
        """See `Candidate.map`."""
        positions = torch.arange(len(rows))
        turn, strip = (rotary_table(one.rope, positions) for one in (self.target, self.source))
        inputs = [strip_rope(key.float(), strip) for key in rows.keys], [v.float() for v in rows.values]
        dtype = getattr(torch, self.target.dtype)
        found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for number, pair in enumerate(zip(*self.sides, strict=True)):
            key, value = (
                side(torch.stack([x[n] for n in side.layers], 1))
                for side, x in zip(pair, inputs, strict=True)
            )
            if self.norms is not None:
                key = normalise(key, self.norms[number])
            found[0].append(apply_rope(key, turn).to(dtype))
            found[1].append(value.to(dtype))
        return KvRows(tuple(found[0]), tuple(found[1]))


def side_cosines(mapping: Mapping, bundle: Bundle) -> torch.Tensor:
    """Attention-output cosine of each layer with only K, and with only V, mapped: `[2, layers]`."""
    found = []
    for windows in bundle.domains.values():
        for window in windows:
            native = bundle.native(window, logits=False)
            mapped = mapping.map(bundle.mapped_from(window).rows)
            alone = KvRows(mapped.keys, native.rows.values), KvRows(native.rows.keys, mapped.values)
            by = [attention_cosines(native.queries, native.scaling, native.rows, rows) for rows in alone]
            found.append(torch.stack([torch.from_numpy(one).mean(1) for one in by]))
    return torch.stack(found).mean(0)


def trials(pair: StudyPair, choose: Bundle, only: list[str]) -> Iterator[tuple[str, Mapping]]:
    """Every trial of one direction; `closed-form` first."""
    known = Together.of(pair)
    shapes = pair.source.identity, pair.target.identity

    def made(keys: Solution, values: Solution, norms: list[torch.Tensor] | None = None) -> Mapping:
        return Mapping((keys.sides, values.sides), *shapes, norms)

    k, v = known.plain("k"), known.plain("v")
    base = made(k, v)
    yield "closed-form", base
    local = known.heads_match and "by-layer" in only
    if "weights" in only:
        wk, wv = known.weighted("k"), known.weighted("v")
        yield "sensitivity weights, keys", made(wk, v)
        yield "sensitivity weights", made(wk, wv)
        if known.heads_match:
            yield "head-local", made(known.plain("k", local=True), known.plain("v", local=True))
            yield (
                "head-local, sensitivity weights",
                made(known.weighted("k", local=True), known.weighted("v", local=True)),
            )
    if "pooled" in only:
        for anchor in (1.0, 0.3, 0.1):
            yield f"values on pooled rows, anchor {anchor:g}", made(k, known.pooled(anchor))
    if "k-norm" in only and known.norms:
        yield "keys renormalised by k_norm", made(known.unscaled(k), v, known.norms)
        yield "keys before k_norm, then k_norm", made(known.before_norm(), v, known.norms)
    if "own-layers" in only:
        yield "layers of K by K, of V by V", made(known.plain("k", own=True), known.plain("v", own=True))
    if local:
        other = made(known.plain("k", local=True), known.plain("v", local=True))
        better = side_cosines(other, choose) > side_cosines(base, choose)
        picked = [
            [b if take else a for a, b, take in zip(*sides, flags.tolist(), strict=True)]
            for sides, flags in zip(zip(base.sides, other.sides, strict=True), better, strict=True)
        ]
        count = int(better.sum())
        yield f"support by layer and side ({count} head-local)", replace(base, sides=(picked[0], picked[1]))


def one_way(pair: StudyPair, name: str, only: list[str], output: Path) -> None:
    """All trials of one direction, a line each."""
    bundle = pair.bundle(tuning=True)
    halves = [
        replace(bundle, domains={text: cut[part::2] for text, cut in bundle.domains.items()})
        for part in (0, 1)
    ]
    base: ArmScores | None = None
    with torch.inference_mode():
        for label, mapping in trials(pair, halves[0], only):
            scores = measure(mapping, halves[1], pair.target, wrong=False)
            base = base or scores
            kl, nll = scores.difference(base, "kl"), scores.difference(base)
            cosine = scores.cosine()
            line = {
                "pair": name, "trial": label, "kl": scores.mean("mapped", "kl"), "kl_change": kl.value,
                "kl_low": kl.low, "kl_high": kl.high, "excess_nll": scores.excess(),
                "nll_change": nll.value, "nll_low": nll.low, "nll_high": nll.high,
                "cosine": float(cosine.mean()), "cosine_worst": float(cosine.min()),
                "windows": halves[1].windows, "n": int(scores.positions().sum()),
            }  # fmt: skip
            keep(output, line)
            print(f"{name} {label}: KL {line['kl']:.4f} ({kl.value:+.4f} [{kl.low:+.4f}, {kl.high:+.4f}]) "
                  f"excess {line['excess_nll']:.4f} cosine {line['cosine']:.4f} "
                  f"worst {line['cosine_worst']:.4f}", flush=True)  # fmt: skip


def keep(path: Path, line: dict[str, object]) -> None:
    """Put a line into a CSV file, in the place of that of the same pair and trial."""
    known: list[dict[str, object]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            known = list(csv.DictReader(file))
    shown = {key: f"{value:.5g}" if isinstance(value, float) else value for key, value in line.items()}
    same = [all(one[key] == shown[key] for key in ("pair", "trial")) for one in known]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(shown), lineterminator="\n")
        table.writeheader()
        table.writerows([*(one for one, again in zip(known, same, strict=True) if not again), shown])


def main(argv: list[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--only", default=",".join(KINDS))
    parser.set_defaults(stride=1, tuning=48)
    parser.add_argument("--output", type=Path, default=RESULTS / "trials.csv")
    given = parser.parse_args(argv)

    given.windows = 2 * len(given.text)  # not looked at, but text for them is set aside
    for pair, name in directions(given):
        one_way(pair, name, given.only.split(","), given.output)


if __name__ == "__main__":
    sys.exit(main())
