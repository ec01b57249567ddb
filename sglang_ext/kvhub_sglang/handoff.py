"""One handoff, step by step: match, promise, load. No SGLang class is needed here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kvhub.exchange import BLOCK_TOKENS
from kvhub_sglang.decide import Decision, unsupported
from kvhub_sglang.lineage import exact_tokens, lineage_of
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
    tokens = req.origin_input_ids + req.output_ids
    report = Report(prompt=len(tokens))
    original = req.cache_salt
    tenant = (original or "", req.extra_key or "")
    try:
        if serving.salts.is_reserved(original):
            raise Refusal(Code.FORGED_SALT, "cache_salt imitates a reserved namespace")
        if kind := unsupported(req):
            raise Refusal(Code.UNSUPPORTED, kind)
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


def promise(serving: Serving, plan: Plan, base: int, exact: int, exact_node: Any, limit: int) -> int:
    """Tokens beyond the device match that a load can bring now; notes them in the plan.

    base: device match in the request's own namespace. exact: device match of the
    same tokens in the exact one (equal to base for an exact plan).
    """
    plan.base, plan.exact_length, plan.exact_node = base, exact, exact_node
    end = min(plan.covered_to(max(base, exact)), limit)
    end -= end % serving.page_size
    plan.promised = 0 if plan.dead else max(0, end - base)
    plan.reused = base + plan.promised
    _account(serving, plan)
    return plan.promised


def leave(plan: Plan, device: int, host: int) -> None:
    """SGLang's own host cache holds `host` more tokens: its load is not mixed with ours."""
    plan.base, plan.promised, plan.reused = device, 0, device + host
    plan.report.count(exact=0 if plan.lossy else plan.reused, reused=plan.reused)
    plan.report.reason, plan.report.detail = Code.HICACHE, "SGLang's host cache serves this request"


def load(
    serving: Serving,
    pool: Pool,
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
        if copied:
            pool.copy(exact_rows(plan.exact_node)[base : base + copied], slots[:copied])
        place(serving, pool, runs, slots, base)
        _remember(serving, plan)
    except Refusal as refusal:
        if slots is not None:
            free(slots)
        fail(plan, refusal.code, refusal.reason)
        _account(serving, plan)
        return 0
    except BaseException:
        if slots is not None:
            free(slots)
        fail(plan, Code.INTERNAL, "unexpected error while loading")
        _account(serving, plan)
        raise
    finally:
        plan.report.milliseconds += (time.perf_counter() - started) * 1e3
    plan.slots = slots
    return count


def fail(plan: Plan, code: Code, reason: str) -> None:
    """Give up on this plan; what is on the device may still be used."""
    plan.dead, plan.promised, plan.reused = True, 0, plan.base
    plan.report.reason, plan.report.detail = code, reason


def _account(serving: Serving, plan: Plan) -> None:
    """Bring the report up to date with what is reused (device match and promise)."""
    report, reused = plan.report, plan.reused
    exact = exact_tokens(serving, plan) if plan.lossy else reused
    report.count(exact=exact, reused=reused)
    if plan.lossy:
        lineages = lineage_of(serving, plan, plan.keys[: -(-reused // BLOCK_TOKENS)])
        report.hops = max((lineage.hops for lineage in lineages), default=0)
    used = [
        plan.blocks[i].candidate
        for i in range(max(plan.base, plan.exact_length) // BLOCK_TOKENS, -(-reused // BLOCK_TOKENS))
        if i in plan.blocks and plan.blocks[i].candidate is not None
    ]
    for candidate in used[:1]:
        assert candidate is not None
        report.source, report.mapper = candidate.source.name, candidate.digest
    report.draft = any(candidate is not None and candidate.draft for candidate in used) or (
        report.mapped > 0 and any(c.draft for c in serving.candidates)
    )
    if report.mapped and not report.mapper and len(serving.candidates) == 1:
        [candidate] = serving.candidates
        report.source, report.mapper = candidate.source.name, candidate.digest
    if not plan.dead:
        report.reason = Code.MAPPED if report.mapped else Code.EXACT


def _remember(serving: Serving, plan: Plan) -> None:
    """Keep the lineage of every reused block for later requests of this process."""
    if plan.lossy:
        keys = plan.keys[: plan.reused // BLOCK_TOKENS]
        for key, lineage in zip(keys, lineage_of(serving, plan, keys), strict=True):
            serving.remember(key, lineage)


def finish(serving: Serving, rid: str, plan: Plan) -> None:
    """Log and count a request once, at its release."""
    if plan.report.reason is Code.NOT_ASKED:
        return
    log_report(rid, plan.report)
    serving.metrics.tokens(plan.report)
