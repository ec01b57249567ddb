"""One handoff, step by step: decide, promise, load. No SGLang class is needed here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvhub_sglang.decide import Decision, unsupported
from kvhub_sglang.lineage import EXACT, RowLineages
from kvhub_sglang.place import Pool, place, read_runs
from kvhub_sglang.plan import Plan
from kvhub_sglang.refusal import Code, Refusal
from kvhub_sglang.report import Report, log_report
from kvhub_sglang.serving import Serving


def new_plan(serving: Serving, req: Any, limit: int, match: Callable[[str | None], int]) -> Plan:
    """Decide for a request that holds no lock and no row. Never raises `Refusal`.

    limit: tokens that may be reused. A request that is refused gets a plan that is
    `dead`, under its own salt; a forged salt is moved where nothing lossy is.
    """
    started = time.perf_counter()
    report = Report(prompt=len(req.origin_input_ids))
    original = req.cache_salt
    tenant = (original or "", req.extra_key or "")
    try:
        if serving.salts.is_reserved(original):
            raise Refusal(Code.FORGED_SALT, "cache_salt imitates a reserved namespace")
        if kind := unsupported(req):
            raise Refusal(Code.UNSUPPORTED, kind)
        tokens = req.origin_input_ids + req.output_ids
        plan = Decision(serving, req, tokens, limit).plan(report, match)
    except Refusal as refusal:
        plan = Plan(original, original, tenant, report, dead=True)
        if refusal.code is Code.FORGED_SALT:
            plan.salt = serving.salts.harmless(str(original))
            plan.tenant = (plan.salt, tenant[1])
        report.reason, report.detail = refusal.code, refusal.reason
    except OSError as error:
        plan = Plan(original, original, tenant, report, dead=True)
        report.reason, report.detail = Code.EXCHANGE, f"cannot look into the exchange: {error.strerror}"
    report.milliseconds += (time.perf_counter() - started) * 1e3
    return plan


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
    end -= end % serving.page_size
    plan.promised = 0 if plan.dead else max(0, end - plan.base)
    if plan.promised and (missing := _missing_prefix(rows, plan)):
        fail(plan, Code.EXACT_PREFIX, f"the first {missing} tokens are not held exactly here")
    account(serving, rows, plan)
    return plan.promised


def _missing_prefix(rows: RowLineages, plan: Plan) -> int:
    """The exact prefix that a mapper of this promise needs and the request would not have, or 0."""
    needed = max(
        (s.candidate.mapper.manifest.exact_prefix for s in plan.placed() if s.candidate is not None),
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
        runs = read_runs(serving, plan, base + copied, base + count) if copied < count else []
        slots = allocate(count)
        if slots is None:
            raise Refusal(Code.CAPACITY, f"no {count} free slots")
        rows.note(slots, EXACT)
        place(serving, pool, runs, slots, base, copy=exact_rows(plan.exact_node)[base : base + copied])
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
        plan.report.milliseconds += (time.perf_counter() - started) * 1e3
    plan.slots, plan.noted = slots, base + count
    return count


def leave(serving: Serving, rows: RowLineages, plan: Plan, base: int, held: Tensor, host: int) -> None:
    """SGLang's own host cache holds `host` more tokens and will load them."""
    plan.base, plan.held, plan.exact_length, plan.promised = base, held, 0, 0
    account(serving, rows, plan, host=host)
    plan.report.reason, plan.report.detail = Code.HICACHE, "SGLang's host cache serves this request"


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


def finish(serving: Serving, rid: str, plan: Plan) -> None:
    """Log and count a request once, at its release."""
    if plan.report.reason is Code.NOT_ASKED:
        return
    log_report(rid, plan.report)
    serving.metrics.tokens(plan.report)
