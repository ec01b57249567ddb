"""A pair's recordings on named windows: what every arm but the mapped ones needs, computed once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kvhub.evaluation.inject import check_injection
from kvhub.evaluation.metrics import LogitSums
from kvhub.files import write_bytes
from kvhub.fit.text import token_digest
from kvhub.model.identity import ModelIdentity
from kvhub.study.compare import Native
from kvhub.study.record import Recording, load, record, recording_path, save

if TYPE_CHECKING:
    from kvhub.model.load import LoadedModel

Progress = Callable[[int, int], None]
"""Called with (windows done, windows in all)."""


def record_all(
    model: LoadedModel,
    domains: Mapping[str, Tensor],
    directory: Path,
    *,
    tail: int,
    progress: Progress | None = None,
) -> None:
    """Put the recordings of `model` on disk; those that are there stay. domains: `[n, prefix + tail]`.

    The injection check is made on the first window of every domain.
    """
    every = [(window, not at) for windows in domains.values() for at, window in enumerate(windows)]
    for done, (window, check) in enumerate(every, 1):
        path = recording_path(directory, model.identity.digest, window, tail)
        if not path.exists():
            made = record(model, window, tail, check=check)
            check_injection([made.injection_error], model.identity.dtype)
            save(path, made)
        if progress is not None:
            progress(done, len(every))


@dataclass(frozen=True)
class Bundle:
    """Recordings of `source` and `target` on the same windows, in one directory."""

    source: ModelIdentity
    target: ModelIdentity
    domains: Mapping[str, Tensor]
    """`{name: [n, prefix + tail]}`, int64."""
    directory: Path
    tail: int

    @classmethod
    def build(
        cls,
        source: LoadedModel,
        target: LoadedModel,
        domains: Mapping[str, Tensor],
        directory: Path,
        *,
        tail: int = 128,
        progress: Progress | None = None,
    ) -> Bundle:
        """Record both models where they are not recorded yet; serves both directions.

        Errors: `Incompatible` where a model's own cache, put back, does not reproduce its logits.
        """
        for model in (source, target):
            record_all(model, domains, directory, tail=tail, progress=progress)
        return cls(source.identity, target.identity, domains, directory, tail)

    def reversed(self) -> Bundle:
        """The same windows for `target -> source`."""
        return Bundle(self.target, self.source, self.domains, self.directory, self.tail)

    @property
    def windows(self) -> int:
        """Over all domains."""
        return sum(len(windows) for windows in self.domains.values())

    def native(self, window: Tensor, *, logits: bool = True) -> Recording:
        """The target's recording of one window."""
        return load(recording_path(self.directory, self.target.digest, window, self.tail), logits=logits)

    def mapped_from(self, window: Tensor, *, logits: bool = False) -> Recording:
        """The source's recording of one window."""
        return load(recording_path(self.directory, self.source.digest, window, self.tail), logits=logits)

    def source_sums(self, window: Tensor, native: Recording) -> LogitSums:
        """The source arm against the target's native logits; kept beside the recordings."""
        name = f"{token_digest([window[None]])}-{self.tail}-{self.target.digest[:16]}.json"
        path = self.directory / self.source.digest / name
        if path.exists():
            return LogitSums(*json.loads(path.read_bytes()))
        logits = self.mapped_from(window, logits=True).logits
        width = min(native.logits.shape[-1], logits.shape[-1])  # padded vocabularies: the common ids
        sums = Native(native.logits[:, :width], native.labels).sums(logits[:, :width])
        write_bytes(path, json.dumps([sums.nll, sums.kl, sums.top1]).encode())
        return sums
