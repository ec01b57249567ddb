"""The calibration set of a fit: windows to fit on, and windows of other documents to score on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvhub.artifact.manifest import Calibration
from kvhub.errors import BadInput
from kvhub.fit.overlap import drop_overlapping
from kvhub.fit.text import read_documents, split_documents, token_digest, windows

MAX_HELD_OUT = 32


@dataclass(frozen=True)
class Corpus:
    """One text file (a domain): its two sides, which share no document and no template."""

    name: str
    calibration: list[str]
    held_out: list[str]


@dataclass(frozen=True)
class CalibrationSet:
    """fit, held_out: windows of token ids `[n, length]` int64."""

    fit: Tensor
    held_out: Tensor
    dataset: str
    """For people: names of the text files, each with the head of a sha256 over its calibration side."""

    def describe(self, stride: int, exact_prefix: int) -> Calibration:
        """What the manifest records."""
        count, length = self.fit.shape
        return Calibration(
            dataset=self.dataset,
            revision=None,
            sequences=count,
            length=length,
            stride=stride,
            tokens=count * length,
            rows=count * len(row_positions(length, stride, exact_prefix)),
            digest=token_digest([self.fit]),
        )


def row_positions(length: int, stride: int, exact_prefix: int) -> range:
    """Positions that enter the moments: every `stride`-th from 0, without the first `exact_prefix`."""
    first = -(-exact_prefix // stride) * stride
    return range(first, length, stride)


def load_corpora(paths: Sequence[Path], *, seed: int = 0) -> list[Corpus]:
    """Read every file and split it by document; the seed changes the order of documents, not their side.

    A held-out document may repeat no file's calibration side. Errors: those of `read_documents`.
    """
    names: list[str] = []
    sides: list[tuple[list[str], list[str]]] = []
    for path in paths:
        same = sum(name.split("~")[0] == path.stem for name in names)
        names.append(f"{path.stem}~{same + 1}" if same else path.stem)
        sides.append(split_documents(read_documents([path]), seed=seed))
    everything = [document for calibration, _ in sides for document in calibration]
    return [
        Corpus(name[:64], calibration, drop_overlapping(held_out, everything))
        for name, (calibration, held_out) in zip(names, sides, strict=True)
    ]


def calibration_set(
    corpora: Sequence[Corpus], tokenizer: Any, *, sequences: int, length: int
) -> CalibrationSet:
    """Windows from all corpora, sampled evenly and interleaved; fewer than `sequences` where the text ends.

    Errors: `BadInput` where not one window can be cut on either side.
    """
    fit = _sample([c.calibration for c in corpora], tokenizer, length, sequences)
    held_out = min(MAX_HELD_OUT, max(1, sequences // 8))
    score = _sample([c.held_out for c in corpora], tokenizer, length, held_out)
    for side, part in ((fit, "calibration"), (score, "held-out")):
        if not len(side):
            raise BadInput(
                f"the {part} side of the text is shorter than one window of {length} tokens",
                "give more text (a tenth of the documents is held out, and those that repeat the rest"
                " are dropped), or a shorter --length",
            )
    dataset = ", ".join(
        f"{c.name}@{hashlib.sha256(chr(0).join(c.calibration).encode()).hexdigest()[:12]}" for c in corpora
    )
    return CalibrationSet(fit, score, dataset)


def _sample(sides: Sequence[Sequence[str]], tokenizer: Any, length: int, count: int) -> Tensor:
    """`count` windows, an equal number of each side where it has them; the others make up for a short one."""
    cut = [windows(side, tokenizer, length=length, limit=count) for side in sides]
    taken: list[Tensor] = []
    for turn in range(count):
        taken.extend(side[turn] for side in cut if turn < len(side))
        if len(taken) >= count:
            break
    return torch.stack(taken[:count]) if taken else torch.empty((0, length), dtype=torch.int64)
