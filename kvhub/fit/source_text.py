"""What `--text` and `--dataset` name, read into corpora."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhub.errors import BadInput
from kvhub.fit.calibration import Corpus, make_corpora
from kvhub.fit.dataset import Dataset, read_dataset
from kvhub.fit.settings import FitSettings
from kvhub.fit.text import read_documents

CHARACTERS = 12
"""Read of a data set for each token wanted: five make a token, a tenth is held out, some repeats others."""


@dataclass(frozen=True)
class Texts:
    """Files and data sets with their weights, in the order given."""

    files: tuple[tuple[Path, float], ...] = ()
    datasets: tuple[tuple[Dataset, float], ...] = ()

    @classmethod
    def parse(cls, files: Sequence[str], datasets: Sequence[str]) -> Texts:
        """`FILE[:WEIGHT]` and `org/name[/folder][@revision][:WEIGHT]`. Errors: `BadInput`."""
        if not files and not datasets:
            raise BadInput("there is no text to fit on", "give --text FILE, or --dataset org/name")
        sets = [_weighted(given) for given in datasets]
        return cls(
            tuple((Path(given), 1.0) if Path(given).exists() else _path(_weighted(given)) for given in files),
            tuple((Dataset.parse(name), weight) for name, weight in sets),
        )

    def read(self, tokenizer: Any, settings: FitSettings, cache: Path) -> list[Corpus]:
        """Errors: those of `read_documents` and `read_dataset`."""
        texts = [(path.stem, read_documents([path], tokenizer=tokenizer)) for path, _ in self.files]
        revisions: list[str | None] = [None] * len(texts)
        tokens = settings.sequences * settings.length
        whole = sum(weight for _, weight in (*self.files, *self.datasets))
        for dataset, weight in self.datasets:
            wanted = math.ceil(CHARACTERS * tokens * weight / whole) + 20 * CHARACTERS * settings.length
            documents, commit = read_dataset(dataset, characters=wanted, cache=cache, tokenizer=tokenizer)
            texts.append((dataset.repo + (f"/{dataset.folder}" if dataset.folder else ""), documents))
            revisions.append(f"commit:{commit}")
        weights = [weight for _, weight in (*self.files, *self.datasets)]
        return make_corpora(texts, weights=weights, revisions=revisions, seed=settings.seed)


def _path(given: tuple[str, float]) -> tuple[Path, float]:
    return Path(given[0]), given[1]


def _weighted(given: str) -> tuple[str, float]:
    name, separator, text = given.rpartition(":")
    if not separator:
        return given, 1.0
    try:
        weight = float(text)
    except ValueError:
        return given, 1.0
    if not 0 < weight < math.inf:
        raise BadInput(f"{given}: a weight is a number above 0", "--text wiki.txt:3 --text code.jsonl:1")
    return name, weight
