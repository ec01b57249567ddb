"""The five arms of one window, on identical tokens.

A window is a prefix and a tail of held-out text. The target reads the tail at
its true positions on

    native          its own cache: one pass over prefix and tail
    mapped          the source's cache of the prefix, through the mapper
    wrong-document  the same for another window's prefix
    empty           nothing

and `source` is the source model's own likelihood of the same tail. With
`exact_prefix` n the first n rows of mapped and wrong-document are the target's
native ones. The first tail token is not scored: its logits belong to the last
prefix token, which no arm but native runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvhub.errors import Corrupt
from kvhub.evaluation.evidence import Arm
from kvhub.evaluation.inject import KvRows, injection_error, run
from kvhub.evaluation.metrics import (
    Array,
    LogitSums,
    RowMoments,
    attention_cosine,
    compare_logits,
    row_moments,
)
from kvhub.evaluation.probe import QueryProbe
from kvhub.mapper.base import Mapper, SourceRows

if TYPE_CHECKING:
    from kvhub.model.load import LoadedModel


@dataclass(frozen=True)
class WindowResult:
    """All that is kept of one window; a few kilobytes, no logits."""

    positions: int
    """Scored positions: tail length - 1."""
    sums: dict[Arm, LogitSums]
    cosine: Array
    """`[layers, attention heads]`, mean over the scored positions' queries."""
    keys: RowMoments
    values: RowMoments
    injection_error: float


class Arms:
    """Runs the arms of one evaluation. Both models are in evaluation mode and on their devices."""

    def __init__(
        self, mapper: Mapper, source: LoadedModel, target: LoadedModel, *, tail: int, exact_prefix: int
    ) -> None:
        self._mapper = mapper.to(source.model.device)
        self._source = source
        self._target = target
        self._tail = tail
        self._exact = exact_prefix

    def mapped_prefix(self, window: Tensor) -> KvRows:
        """The mapped rows of a window's prefix (no exact rows), from a source forward of it alone."""
        prefix = window[: len(window) - self._tail]
        _, cache = run(self._source.model, prefix, keep=1)
        return self._map(KvRows.of(cache, len(prefix)))

    def run(self, window: Tensor, wrong: KvRows) -> tuple[WindowResult, KvRows]:
        """All arms on one window `[prefix + tail]`; `wrong`: another window's mapped prefix.

        Returns the result and this window's mapped rows, which serve as another's wrong document.
        Errors: `Corrupt` when rows or logits are not finite.
        """
        split = len(window) - self._tail
        # The last token is a label only, so no arm runs it.
        body, tail, labels = window[:-1], window[split:-1], window[split + 1 :]
        keep = len(tail)
        target = self._target.model

        source_logits, source_cache = run(self._source.model, body, keep=keep)
        mapped = self._map(KvRows.of(source_cache, split))
        del source_cache
        with QueryProbe(target, keep) as probe:
            native_logits, native_cache = run(target, body, keep=keep)
        native = KvRows.of(native_cache, split)
        del native_cache
        native.check_finite("the target's own cache")

        sums: dict[Arm, LogitSums] = {}

        def score(arm: Arm, logits: Tensor) -> None:
            if not torch.isfinite(logits).all():
                raise Corrupt(f"the {arm} arm gave NaN or infinite logits", "nothing was evaluated")
            sums[arm] = compare_logits(native_logits, logits.to(native_logits.device), labels)

        def tail_on(rows: KvRows | None) -> Tensor:
            return run(target, tail, start=split, rows=rows)[0]

        served = mapped.with_exact_prefix(native, self._exact)
        score("native", native_logits)
        error = injection_error(native_logits, tail_on(native))
        score("source", source_logits)
        del source_logits
        score("mapped", tail_on(served))
        score("wrong-document", tail_on(wrong.with_exact_prefix(native, self._exact)))
        score("empty", tail_on(None))

        rope = self._target.identity.rope
        keys, values = row_moments(native, served, rope, self._exact)
        return (
            WindowResult(keep, sums, self._cosine(probe, native, served), keys, values, error),
            mapped,
        )

    def _map(self, rows: KvRows) -> KvRows:
        """Through the mapper, in the dtype that the target caches."""
        positions = torch.arange(len(rows), device=rows.keys[0].device)
        source = SourceRows(rows.keys, rows.values, positions, self._source.identity.rope)
        target = self._target.model
        keys, values = [], []
        with torch.inference_mode():
            for layer in range(self._target.identity.geometry.num_layers):
                key, value = self._mapper.map_layer(layer, source)
                keys.append(key.to(target.device, target.dtype))
                values.append(value.to(target.device, target.dtype))
        mapped = KvRows(tuple(keys), tuple(values))
        mapped.check_finite("the mapped cache")
        return mapped

    @staticmethod
    def _cosine(probe: QueryProbe, native: KvRows, mapped: KvRows) -> Array:
        return np.stack(
            [
                attention_cosine(
                    probe.queries[layer],
                    probe.scaling[layer],
                    (native.keys[layer], native.values[layer]),
                    (mapped.keys[layer], mapped.values[layer]),
                )
                for layer in range(len(native.keys))
            ]
        )
