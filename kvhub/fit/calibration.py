"""The calibration set of a fit: windows to fit on, to choose k and lambda on, and to score on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvhub.artifact.manifest import Calibration
from kvhub.errors import BadInput
from kvhub.fit.overlap import drop_overlapping
from kvhub.fit.text import read_documents, split_documents, text_head, token_digest, windows

MAX_HELD_OUT = 32
TUNING = 12
"""Windows that k and lambda are chosen on, at most."""
TAIL = 64
"""Tokens at their end that the target runs, at most."""


def tail_of(length: int) -> int:
    """Tokens that the target runs of a tuning window of `length`."""
    return min(TAIL, length // 4)


@dataclass(frozen=True)
class Corpus:
    """One text (a domain): its two sides, which share no document and no template."""

    name: str
    calibration: list[str]
    held_out: list[str]
    weight: float = 1.0
    """Its share of the windows, relative to the others'."""
    revision: str | None = None
    """Of a data set on the Hub."""


@dataclass(frozen=True)
class CalibrationSet:
    """Windows of token ids, int64: `[n, length]`, or a list of `[length]` where lengths are mixed."""

    fit: Tensor | list[Tensor]
    held_out: Tensor
    dataset: str
    """For people: names of the texts, each with the head of a sha256 over its calibration side."""
    tuning: Tensor = field(default_factory=lambda: torch.empty((0, 0), dtype=torch.int64))
    """Of documents that are neither fitted on nor held out: k and lambda are chosen here."""
    revision: str | None = None

    def rows(self, stride: int, exact_prefix: int) -> int:
        """Positions that enter the moments."""
        return sum(len(row_positions(len(window), stride, exact_prefix)) for window in self.fit)

    def describe(self, stride: int, exact_prefix: int) -> Calibration:
        """What the manifest records."""
        lengths = [len(window) for window in self.fit]
        return Calibration(
            dataset=self.dataset,
            revision=self.revision,
            sequences=len(lengths),
            length=max(lengths),
            stride=stride,
            tokens=sum(lengths),
            rows=self.rows(stride, exact_prefix),
            digest=token_digest([list(self.fit)]),
        )


def row_positions(length: int, stride: int, exact_prefix: int) -> range:
    """Positions that enter the moments: every `stride`-th from 0, without the first `exact_prefix`."""
    first = -(-exact_prefix // stride) * stride
    return range(first, length, stride)


def load_corpora(
    paths: Sequence[Path], *, weights: Sequence[float] | None = None, seed: int = 0, tokenizer: Any = None
) -> list[Corpus]:
    """Read every file and split it by document; the seed changes the order of documents, not their side.

    A held-out document may repeat no file's calibration side. weights: shares of the windows, default
    equal. tokenizer: for conversations, which its chat template turns into text.
    Errors: those of `read_documents`.
    """
    return make_corpora(
        [(path.stem, read_documents([path], tokenizer=tokenizer)) for path in paths],
        weights=weights,
        seed=seed,
    )


def make_corpora(
    texts: Sequence[tuple[str, list[str]]],
    *,
    weights: Sequence[float] | None = None,
    revisions: Sequence[str | None] | None = None,
    seed: int = 0,
) -> list[Corpus]:
    """`load_corpora` for (name, documents) that are read already."""
    names: list[str] = []
    sides: list[tuple[list[str], list[str]]] = []
    for stem, documents in texts:
        same = sum(name.split("~")[0] == stem for name in names)
        names.append(f"{stem}~{same + 1}" if same else stem)
        sides.append(split_documents(documents, seed=seed))
    everything = [document for calibration, _ in sides for document in calibration]
    return [
        Corpus(name[:64], calibration, drop_overlapping(held_out, everything), weight, revision)
        for name, (calibration, held_out), weight, revision in zip(
            names, sides, weights or [1.0] * len(names), revisions or [None] * len(names), strict=True
        )
    ]


def calibration_set(
    corpora: Sequence[Corpus],
    tokenizer: Any,
    *,
    sequences: int,
    length: int,
    lengths: Sequence[int] | None = None,
    tuning: bool = False,
) -> CalibrationSet:
    """Windows from all corpora, by weight and interleaved; fewer than `sequences` where the text ends.

    lengths: windows of these lengths in turn, `length` being the longest. tuning: set a tenth of the
    calibration documents aside to choose k and lambda on; they are then not fitted on.
    Errors: `BadInput` where not one window can be cut on a side.
    """
    weights = [corpus.weight for corpus in corpora]
    sides = [corpus.calibration for corpus in corpora]
    tune = torch.empty((0, length), dtype=torch.int64)
    if tuning:
        apart = [_set_aside(side) for side in sides]
        sides = [rest for rest, _ in apart]
        everything = [document for side in sides for document in side]
        chosen = [drop_overlapping(part, everything) for _, part in apart]
        tune = _sample(chosen, weights, tokenizer, length, TUNING)
    fit: Tensor | list[Tensor]
    if lengths is None or len(set(lengths)) == 1:
        fit = _sample(sides, weights, tokenizer, length, sequences)
    else:
        fit = _mixed(sides, weights, tokenizer, lengths, sequences)
    held_out = min(MAX_HELD_OUT, max(1, sequences // 8))
    score = _sample([c.held_out for c in corpora], weights, tokenizer, length, held_out)
    for side, part in ((fit, "calibration"), (score, "held-out"), (tune, "tuning")):
        if not len(side) and (part != "tuning" or tuning):
            raise BadInput(
                f"the {part} side of the text is shorter than one window of {length} tokens",
                "give more text (a tenth of the documents is held out, and those that repeat the rest"
                " are dropped), or a shorter --length",
            )
    dataset = ", ".join(_named(corpus, len(corpora) > 1) for corpus in corpora)
    revisions = {corpus.revision for corpus in corpora}
    return CalibrationSet(fit, score, dataset[:1000], tune, revisions.pop() if len(revisions) == 1 else None)


def _named(corpus: Corpus, several: bool) -> str:
    digest = hashlib.sha256(chr(0).join(corpus.calibration).encode()).hexdigest()[:12]
    share = f" x{corpus.weight:g}" if several and corpus.weight != 1 else ""
    # in a mixture the revision of one text is not the set's
    commit = f" of {corpus.revision}" if several and corpus.revision else ""
    return f"{corpus.name}@{digest}{commit}{share}"


def _set_aside(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """(to fit on, to choose on): a tenth, by content alone, independent of what is held out."""
    rest: list[str] = []
    apart: list[str] = []
    for document in documents:
        digest = hashlib.sha256(b"tuning\n" + document.encode()).digest()
        (apart if digest[0] < 26 else rest).append(document)
    return rest, apart


def _sample(
    sides: Sequence[Sequence[str]], weights: Sequence[float], tokenizer: Any, length: int, count: int
) -> Tensor:
    """`count` windows, each side's share by weight; the others make up for a short one."""
    cut = [windows(side, tokenizer, length=length, limit=count) for side in sides]
    taken = [cut[side][number] for side, number in _order([len(c) for c in cut], weights, count)]
    return torch.stack(taken) if taken else torch.empty((0, length), dtype=torch.int64)


def _mixed(
    sides: Sequence[Sequence[str]],
    weights: Sequence[float],
    tokenizer: Any,
    lengths: Sequence[int],
    count: int,
) -> list[Tensor]:
    """Windows whose lengths take turns, each cut from text that no other one uses."""
    head = len(text_head(tokenizer))
    bodies = [length - head for length in lengths]
    if min(bodies) < 1:
        raise BadInput(f"windows of {min(lengths)} tokens leave no room for text", "use a longer --length")
    rounds = -(-count // len(lengths))
    found: list[Tensor] = []
    for window in _sample(sides, weights, tokenizer, head + sum(bodies), rounds):
        found.extend(torch.cat((window[:head], body)) for body in window[head:].split(bodies))
    return found[:count]


def _order(available: Sequence[int], weights: Sequence[float], count: int) -> list[tuple[int, int]]:
    """(side, its window) in turn: always the side that is furthest behind its weight and has some left."""
    used = [0] * len(available)
    order: list[tuple[int, int]] = []
    while len(order) < count:
        left = [side for side, have in enumerate(available) if used[side] < have]
        if not left:
            break
        side = min(left, key=lambda one: ((used[one] + 1) / weights[one], one))
        order.append((side, used[side]))
        used[side] += 1
    return order
