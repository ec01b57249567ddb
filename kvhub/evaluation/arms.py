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

import torch
from torch import Tensor

from kvhub.errors import Corrupt
from kvhub.evaluation.evidence import Arm
from kvhub.evaluation.inject import KvRows, injection_error, run
from kvhub.evaluation.metrics import (
    Array,
    LogitSums,
    RowMoments,
    attention_cosines,
    compare_logits,
    row_moments,
)
from kvhub.evaluation.probe import QueryProbe
from kvhub.mapper.base import Mapper, SourceRows
from kvhub.model.placement import input_device

if TYPE_CHECKING:
    from kvhub.model.identity import ModelIdentity
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


@dataclass(frozen=True)
class Baseline:
    """What a window gives whatever the mapper; shared by all mappers of one pair."""

    source: KvRows
    """The source's rows of the prefix, to be mapped."""
    native: KvRows
    """The target's own rows of the prefix."""
    logits: Tensor
    """Of the native arm, `[positions, vocabulary]` float32."""
    tail: Tensor
    labels: Tensor
    probe: QueryProbe
    sums: dict[Arm, LogitSums]
    """Of native, source and empty."""
    injection_error: float


class Arms:
    """Runs the arms of one pair. Both models are in evaluation mode and on their devices."""

    def __init__(self, source: LoadedModel, target: LoadedModel, *, tail: int) -> None:
        self._source = source
        self._target = target
        self._tail = tail

    def source_prefix(self, window: Tensor) -> KvRows:
        """The source's rows of a window's prefix, from a forward of it alone."""
        prefix = window[: len(window) - self._tail]
        return KvRows.of(run(self._source.model, prefix, keep=1)[1], len(prefix))

    def baseline(self, window: Tensor) -> Baseline:
        """The arms that need no mapper, on one window `[prefix + tail]`.

        Errors: `Corrupt` when rows or logits are not finite.
        """
        split = len(window) - self._tail
        # The last token is a label only, so no arm runs it.
        body, tail, labels = window[:-1], window[split:-1], window[split + 1 :]
        target = self._target.model
        source_logits, cache = run(self._source.model, body, keep=len(tail))
        source = KvRows.of(cache, split)
        source.check_finite("the source's cache")
        with QueryProbe(target, len(tail)) as probe:
            logits, cache = run(target, body, keep=len(tail))
        native = KvRows.of(cache, split)
        del cache
        native.check_finite("the target's own cache")
        sums: dict[Arm, LogitSums] = {
            "native": _compare("native", logits, logits, labels),
            "source": _compare("source", logits, source_logits, labels),
        }
        del source_logits
        sums["empty"] = _compare("empty", logits, run(target, tail, start=split)[0], labels)
        error = injection_error(logits, run(target, tail, start=split, rows=native)[0])
        return Baseline(source, native, logits, tail, labels, probe, sums, error)

    def mapped(self, base: Baseline, mapper: Mapper, wrong: KvRows, *, exact_prefix: int) -> WindowResult:
        """The arms of one mapper on the window of `base`; wrong: the source's rows of another prefix.

        Errors: `Corrupt` when mapped rows or logits are not finite.
        """
        served = map_rows(mapper, base.source, self._source.identity, self._target).with_exact_prefix(
            base.native, exact_prefix
        )
        other = map_rows(mapper, wrong, self._source.identity, self._target).with_exact_prefix(
            base.native, exact_prefix
        )
        sums = dict(base.sums)
        caches: tuple[tuple[Arm, KvRows], ...] = (("mapped", served), ("wrong-document", other))
        for arm, rows in caches:
            logits, _ = run(self._target.model, base.tail, start=len(base.native), rows=rows)
            sums[arm] = _compare(arm, base.logits, logits, base.labels)
        keys, values = row_moments(base.native, served, self._target.identity.rope, exact_prefix)
        cosine = attention_cosines(base.probe.queries, base.probe.scaling, base.native, served)
        return WindowResult(len(base.labels), sums, cosine, keys, values, base.injection_error)


def map_rows(mapper: Mapper, rows: KvRows, source: ModelIdentity, target: LoadedModel) -> KvRows:
    """The source's rows from position 0 through the mapper, in the dtype that the target caches.

    Errors: `Corrupt` where a mapped row is not finite.
    """
    positions = torch.arange(len(rows), device=rows.keys[0].device)
    found = SourceRows(rows.keys, rows.values, positions, source.rope)
    home, dtype = input_device(target.model), target.model.dtype
    keys, values = [], []
    with torch.inference_mode():
        for layer in range(target.identity.geometry.num_layers):
            key, value = mapper.map_layer(layer, found)
            keys.append(key.to(home, dtype))
            values.append(value.to(home, dtype))
    mapped = KvRows(tuple(keys), tuple(values))
    mapped.check_finite("the mapped cache")
    return mapped


def _compare(arm: Arm, native: Tensor, logits: Tensor, labels: Tensor) -> LogitSums:
    if not torch.isfinite(logits).all():
        raise Corrupt(f"the {arm} arm gave NaN or infinite logits", "nothing was evaluated")
    return compare_logits(native, logits.to(native.device), labels)
