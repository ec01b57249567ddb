"""One handoff, step by step: ask, poll, promise, load. No SGLang class is needed here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvhub.exchange import BLOCK_TOKENS, EXACT
from kvhub_sglang.choice import silent, spoken
from kvhub_sglang.decide import Match, NeedsPrefix, Question, ask, compose, unsupported
from kvhub_sglang.internal import Internal
from kvhub_sglang.lineage import RowLineages
from kvhub_sglang.lookup import look_up, read
from kvhub_sglang.place import Pool, place, staged_runs
from kvhub_sglang.plan import Plan
from kvhub_sglang.refusal import Code, Refusal
from kvhub_sglang.report import Metrics, Report, log_report
from kvhub_sglang.serving import Serving
from kvhub_sglang.stage import Found
from kvhub_sglang.together import begin, on_all, outcome

_MOST_PREFIXES = 64
"""Requests that may wait for their first tokens at once."""
_HICACHE = "SGLang's host cache serves this request"


def new_plan(serving: Serving, req: Any, limit: int, match: Match) -> Plan:
    """Ask for a request that holds no lock and no row. Never raises `Refusal`.

    limit: tokens that may be reused. A request that is refused gets a plan that is
    `dead`, under its own salt; a forged salt is moved where nothing lossy is. Others
    get one that is `waiting` for its stage, until `poll` decides it.
    """
    started = time.perf_counter()
    original = req.cache_salt
    plan = Plan(original, original, (original or "", req.extra_key or ""), Report(len(req.origin_input_ids)))
    try:
        if serving.salts.is_reserved(original):
            raise Refusal(Code.FORGED_SALT, "cache_salt imitates a reserved namespace")
        if kind := unsupported(req):
            raise Refusal(Code.UNSUPPORTED, kind)
        tokens = req.origin_input_ids + req.output_ids
        plan.question = question = ask(serving, req, tokens, limit, match)
        plan.waiting = True
        plan.report.reason = Code.STAGING
        if question.limit // BLOCK_TOKENS * BLOCK_TOKENS > max(question.exact, question.lossy):
            begin(
                serving,
                plan,
                lambda: look_up(serving, question),
                lambda source: read(serving, source),
                wait=_patience(serving, plan.report.prompt, question),
            )
    except Refusal as refusal:
        if refusal.code is Code.FORGED_SALT:
            plan.salt = serving.salts.harmless(str(original))
            plan.tenant = (plan.salt, plan.tenant[1])
        if plan.waiting and plan.question is not None and plan.question.lossy > plan.question.exact:
            plan.found_nothing = refusal  # what the device holds may still be used
        else:
            plan.waiting = False
            fail(plan, refusal.code, refusal.reason)
    plan.report.milliseconds += (time.perf_counter() - started) * 1e3
    return plan


def late_plan(serving: Serving | None, req: Any, off_because: str) -> Plan | None:
    """The report of a request without a plan, once its prompt or a part of it is computed.

    For one that was `silent`: until then nothing is done for it. Where kvhub is off (serving is None), for
    one that was not: off_because is what it is told. None for all others.
    """
    if serving is None:
        if not spoken(req):
            return None
    elif not silent(req, serving.settings) or serving.salts.is_reserved(req.cache_salt):
        return None
    salt = req.cache_salt
    plan = Plan(salt, salt, (salt or "", req.extra_key or ""), Report(len(req.origin_input_ids)), dead=True)
    plan.base = req.cached_tokens
    plan.report.count(exact=plan.base, reused=plan.base)
    if serving is None:
        plan.report.reason, plan.report.detail = Code.DISABLED, off_because
    elif req.host_loaded_length:
        plan.report.reason, plan.report.detail = Code.HICACHE, _HICACHE
    return plan


def _patience(serving: Serving, prompt: int, question: Question) -> float | None:
    """Seconds that a request may wait: no longer than computing it would take."""
    if question.choice.worth == "always":
        return None
    compute = serving.cost.prefill_ms(prompt - question.exact, question.exact)
    return None if compute is None else max(compute, 1.0) / 1e3


def poll(serving: Serving, plan: Plan, match: Match) -> None:
    """Decide a waiting plan if its stage is done or its time is up; else leave it waiting.

    Called in every scheduling pass, before the request holds a lock or a row. Every
    rank calls it for the same requests in the same order.
    """
    started = time.perf_counter()
    question = plan.question
    assert question is not None
    found = plan.found or Found({}, plan.found_nothing)
    if plan.staging:
        staged = outcome(serving, plan, lambda source: read(serving, source))
        if staged is None:
            return
        found = staged
        plan.report.estimate = found.estimate
    plan.waiting = False
    try:
        compose(serving, plan, question, found, match)
        plan.report.reason = Code.EXACT
    except NeedsPrefix as need:
        plan.waiting = _compute_prefix(serving, plan, question, found, need.tokens)
        if not plan.waiting:
            plan.become_exact()
            fail(plan, need.code, need.reason)
    except Refusal as refusal:
        plan.become_exact()
        fail(plan, refusal.code, refusal.reason)
    if not plan.waiting and (plan.dead or not plan.blocks):
        release(serving, plan)
    plan.report.milliseconds += (time.perf_counter() - started) * 1e3


def _compute_prefix(serving: Serving, plan: Plan, question: Question, found: Found, needed: int) -> bool:
    """Have the first tokens computed by a request of our own; whether to go on waiting for them."""
    now = time.monotonic()
    if plan.prefix_until:
        return not serving.ranks.share(now > plan.prefix_until)
    count = -(-needed // serving.page_size) * serving.page_size
    if serving.internal is None or count > question.limit or serving.internal.pending > _MOST_PREFIXES:
        return False
    plan.found, plan.prefix_until = found, now + max(serving.stager.wait_seconds, 1.0)
    salt, extra_key = question.original_salt, question.tenant[1] or None

    def done(req: Any) -> None:
        if req is None:  # aborted: nobody will bring them
            plan.prefix_until = now

    serving.internal.want(Internal("prefix", question.tokens[:count], salt, extra_key, done=done))
    return True


def release(serving: Serving, plan: Plan) -> None:
    """Give back what was staged."""
    if plan.stage is not None:
        serving.stager.close(plan.stage)
        plan.stage = None


def promise(
    serving: Serving,
    rows: RowLineages,
    plan: Plan,
    base: int,
    held: Tensor,
    exact: tuple[int, Any],
    limit: int,
) -> int:
    """Tokens beyond the device match that a load can bring now; notes them in the plan.

    base: device match in the request's own namespace; held: its slots, if that is the
    lossy one. exact: length and node of the device match of the same tokens in the
    exact one (an exact plan: its own).
    """
    plan.base, plan.held = base, held
    plan.exact_length, plan.exact_node = exact
    end = min(plan.covered_to(plan.mapped_from), limit)
    end = max(plan.exact_to(plan.mapped_from), min(end, _tail(plan, end)))
    end = min(end, limit)
    end -= end % serving.page_size
    plan.promised = 0 if plan.dead or plan.waiting else max(0, end - plan.base)
    if plan.promised and (missing := _missing_prefix(rows, plan)):
        fail(plan, Code.EXACT_PREFIX, f"the first {missing} tokens are not held exactly here")
    account(serving, rows, plan)
    return plan.promised


def _tail(plan: Plan, end: int) -> int:
    """Where the native tail of the mapper that gives the last rows before `end` begins."""
    last = plan.blocks.get((end - 1) // BLOCK_TOKENS)
    return end if last is None or last.candidate is None else end - last.candidate.native_tail


def _missing_prefix(rows: RowLineages, plan: Plan) -> int:
    """The exact prefix that a mapper of this promise needs and the request would not have, or 0."""
    needed = max(
        (s.candidate.exact_prefix for s in plan.placed() if s.candidate is not None),
        default=0,
    )
    have = plan.base if plan.base < needed else needed
    kept = bool(rows.exact(plan.held[:have]).all()) if plan.lossy else True
    reach = plan.exact_to(plan.mapped_from) if plan.base < needed else needed
    return 0 if kept and reach >= needed else needed


def load(
    serving: Serving,
    pool: Pool,
    rows: RowLineages,
    plan: Plan,
    allocate: Callable[[int], Tensor | None],
    free: Callable[[Tensor], None],
    exact_rows: Callable[[Any], Tensor],
) -> int:
    """Fill private slots for what was promised; returns all of it or 0.

    On failure the slots are freed, the plan is dead, and the report says why.
    """
    started = time.perf_counter()
    base, count = plan.base, plan.promised
    slots: Tensor | None = None
    try:
        copied = max(0, min(plan.exact_length, base + count) - base)
        # Before the allocation, which evicts: what one rank evicts all must.
        runs = on_all(
            serving.ranks,
            lambda: staged_runs(serving, plan, base + copied, base + count) if copied < count else [],
        )
        slots = allocate(count)
        if slots is None:
            raise Refusal(Code.CAPACITY, f"no {count} free slots")
        filled = slots
        rows.note(slots, EXACT)
        copy = exact_rows(plan.exact_node)[base : base + copied]
        on_all(serving.ranks, lambda: place(serving, pool, runs, filled, base, copy=copy))
        for run in runs:
            for lineage, part in run.lineages():
                rows.note(slots[part.start - base : part.stop - base], lineage)
    except Refusal as refusal:
        if slots is not None:
            free(slots)
        fail(plan, refusal.code, refusal.reason)
        return 0
    except BaseException:
        if slots is not None:
            free(slots)
        fail(plan, Code.INTERNAL, "unexpected error while loading")
        raise
    finally:
        account(serving, rows, plan)
        if plan.dead:
            release(serving, plan)
        seconds = time.perf_counter() - started
        serving.metrics.stage("map", seconds)
        plan.report.milliseconds += seconds * 1e3
    plan.slots, plan.noted = slots, base + count
    return count


def leave(serving: Serving, rows: RowLineages, plan: Plan, base: int, held: Tensor, host: int) -> None:
    """SGLang's own host cache holds `host` more tokens and will load them."""
    plan.base, plan.held, plan.exact_length, plan.promised = base, held, 0, 0
    account(serving, rows, plan, host=host)
    plan.report.reason, plan.report.detail = Code.HICACHE, _HICACHE


def fail(plan: Plan, code: Code, reason: str) -> None:
    """Give up on this plan; what is on the device may still be used."""
    plan.dead, plan.promised = True, 0
    plan.report.reason, plan.report.detail = code, reason


def settle(plan: Plan, device: int, code: Code, reason: str) -> None:
    """Give up without knowing more of the device's rows than that they are there."""
    fail(plan, code, reason)
    plan.report.count(exact=0 if plan.lossy else device, reused=device)
    plan.report.source = plan.report.mapper = ""


def account(serving: Serving, rows: RowLineages, plan: Plan, *, host: int = 0) -> None:
    """Bring the report up to date with what is reused.

    host: tokens that SGLang's own host cache loads; in the lossy namespace their
    history is not known here, and they count as mapped.
    """
    report, placed = plan.report, plan.placed()
    reused = plan.reused + host
    exact = reused
    lineage = EXACT
    if plan.lossy:
        reach = max(plan.base, min(plan.exact_to(plan.mapped_from), plan.reused))
        exact = int(rows.exact(plan.held).sum()) + reach - plan.base
        lineage = rows.under(plan.held)
        for source in placed:
            lineage = lineage.merge(source.lineage)
    report.count(exact=exact, reused=reused)
    report.hops = lineage.hops
    applied = [s.candidate for s in placed if s.candidate is not None]
    under = [c for c in serving.candidates if c.digest in lineage.mappers]
    named = [*applied, *under][:1]
    report.source = named[0].source.name if named and report.mapped else ""
    report.mapper = named[0].digest if named and report.mapped else ""
    report.draft = report.mapped > 0 and any(c.draft for c in (*applied, *under))
    if not plan.dead:
        report.reason = Code.MAPPED if report.mapped else Code.EXACT


def finish(metrics: Metrics, rid: str, plan: Plan) -> None:
    """Log and count a request once, at its release."""
    if plan.report.reason is Code.NOT_ASKED:
        return
    log_report(rid, plan.report)
    metrics.request(plan.report)
