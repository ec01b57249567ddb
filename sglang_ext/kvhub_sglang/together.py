"""Stages of tensor-parallel ranks: rank 0 looks, all read, and they go on with the same blocks.

Rank 0 alone asks the exchange what is there and weighs whether it is worth it; it tells
the others, each rank reads its own heads of the same blocks, and what every rank has is
what is used. On one rank all of it is that rank's own stage.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from kvhub.exchange import Block, Lineage
from kvhub_sglang.plan import BlockSource, Plan
from kvhub_sglang.ranks import Ranks
from kvhub_sglang.refusal import Code, Refusal
from kvhub_sglang.stage import Found, Stage

if TYPE_CHECKING:
    from kvhub_sglang.serving import Serving

T = TypeVar("T")

_ELSEWHERE = "it failed on another rank"


def begin(
    serving: Serving,
    plan: Plan,
    look: Callable[[], Found],
    read: Callable[[BlockSource], Block],
    *,
    wait: float | None,
) -> None:
    """Start the stage that `plan` waits for; `Refusal` on every rank where none can be."""
    ranks = serving.ranks
    plan.staging = True

    def start() -> None:
        if ranks.rank == 0:
            plan.stage = serving.stager.start(look, read, wait=wait)

    try:
        on_all(ranks, start)
    except Refusal:
        plan.staging = False
        raise


def outcome(serving: Serving, plan: Plan, read: Callable[[BlockSource], Block]) -> Found | None:
    """What `plan` may use, the same on every rank; None while it is to wait."""
    if serving.ranks.size == 1:
        stage = plan.stage
        assert stage is not None
        return _ended(serving, plan, stage.done) if stage.done or stage.late else None
    if plan.told is None:
        return _listen(serving, plan, read)
    stage = plan.stage
    done = serving.ranks.all(stage is not None and stage.done)
    late = serving.ranks.share(stage is None or stage.late)
    if not done and not late:
        return None
    found = _ended(serving, plan, done)
    count = serving.ranks.least(len(found.blocks) if done else 0)
    told, plan.told = plan.told, None
    kept = dict(sorted(told.blocks.items())[:count])
    why = found.why if serving.ranks.rank == 0 or len(found.blocks) == count else None
    return Found(kept, why or told.why or Refusal(Code.EXCHANGE, _ELSEWHERE), told.estimate)


def _listen(serving: Serving, plan: Plan, read: Callable[[BlockSource], Block]) -> Found | None:
    """Rank 0 tells what it found, once it is done; the others begin to read it."""
    stage, ranks = plan.stage, serving.ranks
    done = stage is not None and stage.done
    told = ranks.share(_said(stage, done) if stage is not None else None)
    if told is None:
        return None
    found = _heard(serving, told)
    if not found.blocks:
        plan.staging = False
        return _ended(serving, plan, done) if stage is not None else found

    def look() -> Found:
        for candidate in found.candidates:
            candidate.make_ready()
        return found

    def start() -> None:
        if stage is None:
            plan.stage = serving.stager.start(look, read)

    try:
        on_all(ranks, start)
    except Refusal as refusal:
        if plan.stage is not None:
            _ended(serving, plan, plan.stage.done)
        plan.staging = False
        return Found({}, refusal)
    if stage is not None:
        found.why, found.estimate = stage.found.why, stage.found.estimate
    plan.told = found
    return None


def on_all(ranks: Ranks, call: Callable[[], T]) -> T:
    """`call()`, on every rank; where it fails on one, it fails on all: there with its own error."""
    try:
        value = call()
    except Exception:
        ranks.all(False)
        raise
    if not ranks.all(True):
        raise Refusal(Code.EXCHANGE, _ELSEWHERE)
    return value


def _ended(serving: Serving, plan: Plan, done: bool) -> Found:
    """The plan stops waiting for its stage."""
    stage = plan.stage
    plan.staging = False
    if stage is None:
        return Found({}, Refusal(Code.EXCHANGE, _ELSEWHERE))
    serving.stager.ended(stage)
    plan.report.waited = (time.monotonic() - stage.started) * 1e3
    plan.report.staged = stage.seconds * 1e3
    serving.metrics.stage("wait", plan.report.waited / 1e3)
    if stage.done and done:
        return stage.found
    waited = stage.until - stage.started
    return Found({}, Refusal(Code.SLOW, f"not read within {waited * 1e3:.0f} ms"))


def _said(stage: Stage, done: bool) -> list[list[Any]] | None:
    """The blocks that rank 0 found; none if its time is up; None while it still looks."""
    if not done:
        return [] if stage.late else None
    return [
        [
            index,
            source.key.hex(),
            source.candidate.digest if source.candidate is not None else "",
            source.lineage.hops,
            list(source.lineage.mappers),
        ]
        for index, source in sorted(stage.found.blocks.items())
    ]


def _heard(serving: Serving, told: list[list[Any]]) -> Found:
    """Rank 0's list, with this rank's own candidates."""
    known = {candidate.digest: candidate for candidate in serving.candidates}
    blocks = {}
    for index, key, digest, hops, mappers in told:
        candidate = known[digest] if digest else None
        layout = candidate.layout if candidate is not None else serving.layout
        lineage = Lineage(hops=hops, mappers=mappers)
        blocks[int(index)] = BlockSource(bytes.fromhex(key), candidate, lineage, layout.nbytes)
    return Found(blocks, Refusal(Code.SLOW, "rank 0 found nothing in time") if not blocks else None)
