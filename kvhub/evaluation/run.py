"""Evaluate a mapper on held-out text: the arms, the scores, the verdict, the record."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from torch import Tensor

import kvhub
from kvhub.errors import BadInput, Incompatible
from kvhub.evaluation.arms import Arms, WindowResult
from kvhub.evaluation.evidence import RESERVED, Evidence
from kvhub.evaluation.gate import Gate, judge
from kvhub.evaluation.inject import check_injection
from kvhub.evaluation.summary import summarize
from kvhub.fit.text import token_digest
from kvhub.mapper.base import Mapper
from kvhub.model.placement import input_device

if TYPE_CHECKING:
    from kvhub.artifact.manifest import Manifest
    from kvhub.model.identity import ModelIdentity
    from kvhub.model.load import LoadedModel

Progress = Callable[[int, int], None]
"""Called with (windows done, windows in all)."""


@dataclass(frozen=True)
class EvalSettings:
    """How to evaluate; the prefix is what the windows have before the tail."""

    tail: int = 64
    """Tokens that the target runs itself; all but the first are scored."""
    exact_prefix: int | None = None
    """Rows native in the mapped arms; None: as many as the mapper's manifest asks for."""
    seed: int = 0
    """Of the bootstrap."""
    resamples: int = 2000
    gate: Gate = field(default_factory=Gate)


def evaluate(
    mapper: Mapper,
    source: LoadedModel,
    target: LoadedModel,
    domains: Mapping[str, Tensor],
    settings: EvalSettings | None = None,
    *,
    progress: Progress | None = None,
) -> Evidence:
    """Run all arms on `domains`, `{name: [windows, prefix + tail] int64 token ids}`.

    One window's logits and four prefixes' rows are held at a time, whatever the number of windows.
    The same input and seed give the same record, but for `created`.

    Errors: `Incompatible` when a live model is not the one that the mapper was fitted on, or when
    the injection check fails (on the first window already); `BadInput` for unusable windows;
    `Corrupt` for rows or logits that are not finite.
    """
    return evaluate_all([mapper], source, target, domains, settings, progress=progress)[0]


def evaluate_all(
    mappers: Sequence[Mapper],
    source: LoadedModel,
    target: LoadedModel,
    domains: Mapping[str, Tensor],
    settings: EvalSettings | None = None,
    *,
    progress: Progress | None = None,
) -> list[Evidence]:
    """`evaluate` for several mappers of one pair: the arms that need no mapper run once.

    Each record is what `evaluate` gives for that mapper alone.
    """
    settings = settings or EvalSettings()
    exact = [
        m.manifest.exact_prefix if settings.exact_prefix is None else settings.exact_prefix for m in mappers
    ]
    for mapper in mappers:
        check_model("source", mapper.manifest.source, source.identity)
        check_model("target", mapper.manifest.target, target.identity)
    prefix = _check_windows(domains, settings, max(exact))
    _check_context(prefix + settings.tail, source.identity, target.identity)

    placed = [mapper.to(input_device(source.model)) for mapper in mappers]
    total, done = sum(len(windows) for windows in domains.values()), 0
    arms = Arms(source, target, tail=settings.tail)
    results: list[dict[str, list[WindowResult]]] = [{} for _ in mappers]
    for name, windows in domains.items():
        found: list[dict[int, WindowResult]] = [{} for _ in mappers]
        order = wrong_document_order(len(windows))
        wrong = arms.source_prefix(windows[order[-1]])
        for index in order:
            base = arms.baseline(windows[index])
            check_injection([base.injection_error], target.identity.dtype)
            for mapper, count, mine in zip(placed, exact, found, strict=True):
                mine[index] = arms.mapped(base, mapper, wrong, exact_prefix=count)
            wrong = base.source
            done += 1
            if progress is not None:
                progress(done, total)
        for mine, kept in zip(found, results, strict=True):
            kept[name] = [mine[index] for index in range(len(windows))]
    text = token_digest(domains.values())
    return [
        _evidence(mapper.manifest, kept, settings, exact_prefix=count, prefix=prefix, text=text)
        for mapper, count, kept in zip(mappers, exact, results, strict=True)
    ]


def _evidence(
    manifest: Manifest,
    results: Mapping[str, Sequence[WindowResult]],
    settings: EvalSettings,
    *,
    exact_prefix: int,
    prefix: int,
    text: str,
) -> Evidence:
    injection = max(r.injection_error for windows in results.values() for r in windows)
    scores, layers = summarize(results, resamples=settings.resamples, seed=settings.seed)
    return Evidence(
        mapper=manifest.digest,
        kvhub_version=kvhub.__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        protocol=(
            f"prefix {prefix}, tail {settings.tail} (first tail token not scored), "
            f"{manifest.source.dtype} to {manifest.target.dtype}, "
            f"bootstrap over windows {settings.resamples} x seed {settings.seed}"
        ),
        text=text,
        windows=sum(len(windows) for windows in results.values()),
        exact_prefix=exact_prefix,
        injection_max_logit_error=injection,
        scores=scores,
        layers=layers,
        verdict=judge(
            scores,
            injection_error=injection,
            exact_prefix=exact_prefix,
            served_exact_prefix=manifest.exact_prefix,
            gate=settings.gate,
        ),
    )


def check_model(role: str, fitted: ModelIdentity, live: ModelIdentity) -> None:
    """Raise `Incompatible` unless the live model is, by digest, the one the mapper was fitted on."""
    if fitted.digest == live.digest:
        return
    for part in ("revision", "dtype", "tokenizer", "geometry", "architecture"):
        if getattr(fitted, part) != getattr(live, part):
            break
    else:
        part = "rope"
    shown = ""
    if part in ("revision", "dtype", "architecture"):
        shown = f": {getattr(live, part)[:24]}, fitted on {getattr(fitted, part)[:24]}"
    raise Incompatible(
        f"the {role} {live.name} is not the mapper's {fitted.name}: its {part} differs{shown}",
        f"give the {role} that the mapper was fitted on, or fit a mapper for this one",
        code=f"{role}-{part}",
    )


def wrong_document_order(count: int) -> list[int]:
    """Order of visit in which each window's wrong document is the one before it (cyclic).

    A fixed single-cycle derangement with the largest step up to half the windows that visits all
    of them: neighbours often come from one document and would not be wrong enough.
    """
    step = next(s for s in range(max(count // 2, 1), 0, -1) if math.gcd(s, count) == 1)
    return [i * step % count for i in range(count)]


def _check_windows(domains: Mapping[str, Tensor], settings: EvalSettings, exact: int) -> int:
    """The prefix length shared by all windows."""
    if not domains:
        raise BadInput("there is no text to evaluate on", "give --text FILE")
    widths = {windows.shape[1] for windows in domains.values()}
    if len(widths) != 1:
        raise BadInput("the windows of all texts must have one length")
    prefix = widths.pop() - settings.tail
    if settings.tail < 2:
        raise BadInput("the tail must have at least 2 tokens: the first is not scored")
    if prefix < 1:
        raise BadInput(f"the windows leave no prefix before a tail of {settings.tail} tokens")
    if not 0 <= exact < prefix:
        raise BadInput(
            f"an exact prefix of {exact} leaves nothing to map in a prefix of {prefix} tokens",
            "use a longer --prefix",
        )
    for name, windows in domains.items():
        if name in RESERVED:
            raise BadInput(f"a text may not be called {name!r}", "rename the file")
        if len(windows) < 2:
            raise BadInput(
                f"{name} has {len(windows)} held-out windows of {prefix + settings.tail} tokens, not 2",
                "give more text: a wrong document takes another window",
            )
        if len(windows) != len({tuple(row) for row in windows[:, :prefix].tolist()}):
            raise BadInput(f"{name} has two windows with the same prefix", "remove repeated text")
    return prefix


def _check_context(length: int, *models: ModelIdentity) -> None:
    for model in models:
        if length > model.rope.context:
            raise BadInput(
                f"windows of {length} tokens exceed the context of {model.name} ({model.rope.context})",
                "use a shorter --prefix or --tail",
            )
