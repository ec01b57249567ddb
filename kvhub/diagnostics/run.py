"""Diagnose a mapper on held-out text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from torch import Tensor

import kvhub
from kvhub.diagnostics.by_k import r2_by_k
from kvhub.diagnostics.maps import PairRows
from kvhub.diagnostics.observe import observe
from kvhub.diagnostics.record import Diagnostics, LayerMaps
from kvhub.diagnostics.summary import layers, profile, summarize
from kvhub.diagnostics.window import WindowDiagnosis, diagnose_window
from kvhub.errors import BadInput
from kvhub.evaluation.arms import map_rows
from kvhub.evaluation.run import check_model
from kvhub.fit.text import token_digest
from kvhub.mapper.base import Mapper
from kvhub.model.placement import input_device

if TYPE_CHECKING:
    from kvhub.model.load import LoadedModel

Progress = Callable[[int, int], None]


def diagnose(
    mapper: Mapper,
    source: LoadedModel,
    target: LoadedModel,
    domains: Mapping[str, Tensor],
    *,
    tail: int = 64,
    maps: bool = True,
    resamples: int = 2000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Diagnostics:
    """All diagnostics of `mapper` on `domains`, `{name: [windows, prefix + tail] int64 token ids}`.

    The windows are those of an evaluation; one is held at a time. maps: also the R2 maps and R2 against
    k of the pair, which need its moments (8 F_s (F_s + F_t) bytes three times over, F being layers x KV
    heads x head_dim). The same input and seed give the same record, but for `created`.
    Errors: `Incompatible` where a live model is not the mapper's, `BadInput` for unusable windows,
    `Corrupt` for rows that are not finite.
    """
    manifest = mapper.manifest
    check_model("source", manifest.source, source.identity)
    check_model("target", manifest.target, target.identity)
    length = _check(domains, tail, manifest.exact_prefix)
    placed = mapper.to(input_device(source.model))
    total, done = sum(len(windows) for windows in domains.values()), 0
    halves = [PairRows(manifest.source.geometry, manifest.target.geometry) for _ in range(2 * maps)]
    results: dict[str, list[WindowDiagnosis]] = {}
    for name, windows in domains.items():
        results[name] = []
        for number, window in enumerate(windows):
            seen = observe(source, target, window, tail)
            rows = map_rows(placed, seen.source, source.identity, target)
            results[name].append(diagnose_window(seen, rows, exact_prefix=manifest.exact_prefix))
            if maps:
                halves[number % 2].add(seen, manifest.source.rope, start=manifest.exact_prefix)
            done += 1
            if progress is not None:
                progress(done, total)
    pooled = [window for windows in results.values() for window in windows]
    by_k = r2_by_k(halves[0], halves[1]) if maps else []
    return Diagnostics(
        mapper=manifest.digest,
        kvhub_version=kvhub.__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        text=token_digest(domains.values()),
        windows=total,
        prefix=length - tail,
        tail=tail,
        exact_prefix=manifest.exact_prefix,
        scores=summarize(results, resamples=resamples, seed=seed),
        layers=layers(pooled),
        positions=[profile(name, windows) for name, windows in results.items()],
        maps=_maps(halves) if maps else None,
        by_k=by_k,
    )


def _maps(halves: Iterable[PairRows]) -> LayerMaps:
    first, second = halves
    first.moments.merge(second.moments)
    first.raw_key.merge(second.raw_key)
    found = first.maps()
    return LayerMaps(
        rows=first.raw_key.n, **{name: value.tolist() for name, value in found._asdict().items()}
    )


def _check(domains: Mapping[str, Tensor], tail: int, exact_prefix: int) -> int:
    """The length shared by all windows."""
    lengths = {windows.shape[1] for windows in domains.values()}
    if len(lengths) != 1:
        raise BadInput("the windows of all texts must have one length, and there must be one")
    length = lengths.pop()
    if not 2 <= tail < length:
        raise BadInput(f"windows of {length} tokens leave no prefix before a tail of {tail} tokens")
    if exact_prefix >= length - tail:
        raise BadInput(
            f"an exact prefix of {exact_prefix} leaves nothing to diagnose", "use a longer --prefix"
        )
    return length
