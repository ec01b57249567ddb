"""The radix cache that SGLang is given: `UnifiedRadixCache` with handoffs.

Every override is guarded: an exception here would end the scheduler, so it is
counted, logged once, kvhub is switched off in this process and SGLang's own
method decides. What a request already holds stays valid: the salt it lives under
is read from the request by all of SGLang's code, and slots that were filled are
handed over or freed here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvhub_sglang import handoff
from kvhub_sglang.background import Background
from kvhub_sglang.choice import silent
from kvhub_sglang.decide import unsupported
from kvhub_sglang.lineage import RowLineages
from kvhub_sglang.namespace import Salts
from kvhub_sglang.place import Pool, replace_by_exact
from kvhub_sglang.plan import Plan
from kvhub_sglang.prefills import Prefills
from kvhub_sglang.publish import publish
from kvhub_sglang.queueing import PLAN, QueueingCache, limit_of
from kvhub_sglang.ranks import RanksFailed
from kvhub_sglang.refusal import Code
from kvhub_sglang.report import META_KEY, Metrics, logger
from kvhub_sglang.serving import Serving
from kvhub_sglang.watch import Watch

T = TypeVar("T")


class KvhubRadixCache(QueueingCache):
    """Publishes finished blocks, and serves a request's prefix from another model's."""

    def __init__(self, params: CacheInitParams) -> None:
        # reset() is called from the base constructor, before serve() can be
        self.serving: Serving | None = None
        self.pool: Pool | None = None
        self.rows = RowLineages(0)
        self.off_because = "not started"
        self._salts: Salts | None = None  # outlives a switch-off: lossy rows stay in the tree
        self.metrics: Metrics | None = None  # and so does this: requests go on asking
        self._load_is_private = False
        self._staged: dict[Any, Plan] = {}
        self._in_work: WeakSet[Any] = WeakSet()
        self._prefills = Prefills()
        self.watch: Watch | None = None
        self.background: Background | None = None
        self._left_gate: list[str] = []
        super().__init__(params)

    def serve(self, serving: Serving) -> None:
        """Start handing off; until then this is SGLang's own cache."""
        self.pool = Pool(self.token_to_kv_pool_allocator.get_kvcache())
        self.rows = RowLineages(self.pool.size)
        self._salts, self.metrics = serving.salts, serving.metrics
        if serving.internal is not None:
            self.background = Background(
                serving, serving.internal, self._exact_match, self._room, self._left_gate.append
            )
        self.serving, self.off_because = serving, ""

    def switch_off(self, reason: str) -> None:
        """Stop all handoffs and publishing in this process; requests in flight go on."""
        if self.serving is not None:
            logger.error("kvhub is off in this process: %s", reason)
            self.serving.metrics.off()
            if self.watch is not None:
                self.watch.stop()
            self.serving, self.off_because = None, reason

    def _guarded(self, where: str, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as error:
            logger.exception("kvhub failed in %s", where)
            if self.serving is not None:
                self.serving.metrics.error(where)
            self._stop(f"{type(error).__name__} in {where}", error)
            return otherwise

    def _stop(self, reason: str, error: Exception) -> None:
        """Switch off; with other ranks, at the next point where all of them meet."""
        serving = self.serving
        if serving is not None and serving.ranks.size > 1 and not isinstance(error, RanksFailed):
            serving.ranks.failed = serving.ranks.failed or reason
        else:
            self.switch_off(reason)

    # ---- match: decide and promise

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        req = params.req
        if req is None:
            return super().match_prefix(params)
        plan = self._guarded("match_prefix", lambda: self._plan(req, params.key), None)
        params.key.cache_salt = req.cache_salt or None
        result = super().match_prefix(params)
        serving = self.serving
        if plan is None or (plan.waiting and serving is not None):
            return result
        if serving is None:  # switched off since the decision: what the device holds may still be used
            handoff.settle(plan, result.device_prefix_len, Code.DISABLED, self.off_because)
            self._refresh(req, plan)
            return result
        promised = self._guarded("promise", lambda: self._promise(serving, plan, req, params.key, result), 0)
        if plan.lossy and not promised and not result.device_prefix_len and not result.host_hit_length:
            # nothing lossy to be had after all: one root serves every namespace
            plan.become_exact()
            req.cache_salt, params.key.cache_salt = plan.salt, plan.salt or None
            result = super().match_prefix(params)
            self._guarded("promise", lambda: self._promise(serving, plan, req, params.key, result), 0)
            promised = plan.promised
        self._refresh(req, plan)
        if promised:
            result = result._replace(
                host_hit_length=promised,
                last_host_node=result.last_device_node,
                best_match_node=result.last_device_node,
            )
        return result

    def _plan(self, req: Any, key: RadixKey) -> Plan | None:
        plan: Plan | None = getattr(req, PLAN, None)
        if plan is not None:
            if plan.slots is not None:  # filled for a batch that was not formed
                self.token_to_kv_pool_allocator.free(plan.slots)
                plan.slots = None
            if plan.waiting and self.serving is not None:
                self._poll(self.serving, plan, req, key)
            return plan
        if req.lock is not None or req.kv.holds_kv or self._internal(req.rid) is not None:
            return None
        serving, salts = self.serving, self._salts
        if serving is None:
            if salts is not None and salts.is_reserved(req.cache_salt):
                req.cache_salt = salts.harmless(req.cache_salt)  # lossy rows may still be in the tree
            return None
        if silent(req, serving.settings) and not serving.salts.is_reserved(req.cache_salt):
            return None  # a request that nobody speaks for waits for nothing of ours: see `_late`
        self._withdraw(serving)
        plan = handoff.new_plan(
            serving,
            req,
            limit_of(req, key),
            lambda salt: self._held(req, key, salt),
        )
        self._attach(req, plan)
        req.cache_salt = plan.salt
        if plan.waiting:
            self._staged[req.cache_request_handle] = plan
            if not plan.staging:
                self._poll(serving, plan, req, key)
        return plan

    def _late(self, req: Any) -> Plan | None:
        """The report of a request that went by without a plan, before its first token is sent."""
        if self._internal(req.rid) is not None:
            return None
        plan = handoff.late_plan(self.serving, req, self.off_because)
        if plan is not None:
            self._attach(req, plan)
        return plan

    @staticmethod
    def _attach(req: Any, plan: Plan) -> None:
        setattr(req, PLAN, plan)
        info = req.customized_info if req.customized_info is not None else {}
        info[META_KEY] = [plan.report.as_meta()]
        req.customized_info = info

    def _withdraw(self, serving: Serving) -> None:
        """Act on what was noticed since the last request; requests in flight refuse at their load."""
        found = [self.watch.found.popleft() for _ in range(len(self.watch.found))] if self.watch else []
        gated = {c.digest for c in serving.candidates if not c.draft}  # a draft never was in the gate
        found += [(digest, "shadow") for digest in self._left_gate if digest in gated]
        self._left_gate.clear()
        for digest, cause in serving.ranks.share(found):
            serving.withdraw(digest, cause)

    def _poll(self, serving: Serving, plan: Plan, req: Any, key: RadixKey) -> None:
        """Decide if it can be decided; the request holds no lock and no row while it waits."""
        if req.lock is not None or req.kv.holds_kv:  # admitted without us: left as it is
            plan.waiting = False
            handoff.fail(plan, Code.INTERNAL, "admitted while its blocks were read")
            handoff.release(serving, plan)
            return
        handoff.poll(serving, plan, lambda salt: self._held(req, key, salt))
        if not plan.waiting:
            req.cache_salt = plan.salt  # last: from here on the request lives there

    def release_aborted_request(self, handle: Any) -> None:
        super().release_aborted_request(handle)
        self._guarded("release_aborted_request", lambda: self._abandon(handle), None)

    def _abandon(self, handle: Any) -> None:
        if self.background is not None:
            self.background.internal.finished(handle.rid, None)
        plan = self._staged.pop(handle, None)
        if plan is not None and self.serving is not None:
            handoff.release(self.serving, plan)

    def _promise(self, serving: Serving, plan: Plan, req: Any, key: RadixKey, result: MatchResult) -> int:
        base = result.device_prefix_len
        exact, node = base, result.last_device_node
        held = torch.empty(0, dtype=torch.int64)
        if plan.lossy:
            found = self._device_match(req, key, plan.original_salt)
            exact, node = found.device_prefix_len, found.last_device_node
            held = self.path_device_indices(result.last_device_node)[:base]
        if result.host_hit_length:
            # SGLang's own host cache serves this request: the two loads are not mixed
            handoff.leave(serving, self.rows, plan, base, held, result.host_hit_length)
            return 0
        return handoff.promise(serving, self.rows, plan, base, held, (exact, node), limit_of(req, key))

    # ---- load: all of the promise or nothing

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, Any] | None:
        req = params.req
        plan: Plan | None = getattr(req, PLAN, None)
        self._load_is_private = plan is not None and plan.promised > 0
        if plan is None or not self._load_is_private:
            return self._stock_load(params, plan)
        loaded = self._guarded("init_load_back", lambda: self._load(req, plan), 0)
        if not loaded:
            if not plan.dead:
                handoff.settle(plan, plan.base, Code.DISABLED, self.off_because)
            if req.prefix_len == 0 and plan.lossy:
                plan.become_exact()
                req.cache_salt = plan.salt
        self._refresh(req, plan)
        return loaded, req.last_node

    def _stock_load(self, params: InitLoadBackParams, plan: Plan | None) -> tuple[int, Any] | None:
        loaded: tuple[int, Any] | None = super().init_load_back(params)
        if plan is not None and plan.lossy and loaded is not None and loaded[0]:
            fresh = self.path_device_indices(loaded[1])[plan.base :]
            self._guarded("lineage", lambda: self.rows.note(fresh, plan.worst), None)
            plan.noted = plan.base + loaded[0]
        return loaded

    def _load(self, req: Any, plan: Plan) -> int:
        serving, pool = self.serving, self.pool
        if serving is None or pool is None:  # switched off since the promise
            return 0
        lock = self.lock(plan.exact_node) if plan.lossy else None
        try:
            return handoff.load(
                serving,
                pool,
                self.rows,
                plan,
                self._allocate,
                self.token_to_kv_pool_allocator.free,
                self.path_device_indices,
            )
        finally:
            self.unlock(lock)

    def load_back_is_cache_owned(self) -> bool:
        # private slots belong to the request until its checkpoint inserts them
        if self._load_is_private:
            return False
        return bool(super().load_back_is_cache_owned())

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        plan: Plan | None = getattr(req, PLAN, None)
        if plan is not None and plan.lossy and plan.base:
            self._guarded("healed", lambda: self._healed(req, plan), None)
        if plan is None or plan.slots is None:
            return super().prefix_device_indices(req)  # type: ignore[no-any-return]
        slots, plan.slots = plan.slots, None
        self._guarded("release", lambda: self._unstage(req, plan), None)
        rows: torch.Tensor = torch.cat([self.path_device_indices(req.last_node), slots])
        assert len(rows) >= req.prefix_len, (req.rid, len(rows), req.prefix_len)
        return rows[: req.prefix_len]

    def _healed(self, req: Any, plan: Plan) -> None:
        """Rows that were mapped first and computed since: whoever has both gets the exact ones.

        Here the request is admitted: its path is locked, and nothing is evicted before the copy.
        """
        serving, pool = self.serving, self.pool
        # a load from the host may still be writing, layer by layer, what is to be replaced
        if serving is None or pool is None or self.cache_controller is not None:
            return
        if bool(self.rows.exact(plan.held).all()):
            return
        tokens = req.origin_input_ids + req.output_ids
        key = RadixKey(tokens, req.extra_key, limit=plan.base, cache_salt=plan.original_salt)
        found = super().match_prefix(MatchPrefixParams(key=key))
        exact = self.path_device_indices(found.last_device_node)[: found.device_prefix_len]
        if replace_by_exact(serving, pool, self.rows, plan.held, exact):
            handoff.account(serving, self.rows, plan)
            self._refresh(req, plan)

    def _computed(self, req: Any, plan: Plan) -> None:
        """A prompt was computed, or a chunk of it."""
        self._unstage(req, plan)
        if self.serving is not None and not plan.observed:
            times = req.time_stats
            entered, done = times.forward_entry_time, times.prefill_finished_time
            if done > entered > 0:
                plan.observed = True
                hidden = plan.report.reason is Code.HICACHE  # how much its loads brought is not known here
                tokens = 0 if hidden else len(req.origin_input_ids) - plan.reused
                self._prefills.add(self.serving.cost, entered, done, tokens, plan.reused)

    def _unstage(self, req: Any, plan: Plan) -> None:
        self._staged.pop(req.cache_request_handle, None)
        if self.serving is not None:
            handoff.release(self.serving, plan)

    # ---- checkpoint: publish what a finished request computed

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        plan: Plan | None = getattr(req, PLAN, None)
        if plan is None:
            plan = self._guarded("report", lambda: self._late(req), None)
        if plan is not None and plan.lossy:
            # before the tree can show these rows to anyone
            self._guarded("lineage", lambda: self._note(req, plan, up_to), None)
        if plan is not None:
            self._guarded("release", lambda: self._computed(req, plan), None)
        super().checkpoint(req, up_to=up_to, **kwargs)
        self._in_work.add(req)
        serving, pool = self.serving, self.pool
        if serving is None or pool is None or serving.settings.publish == "none" or not req.finished():
            return
        if unsupported(req) is None and req.kv.req_pool_idx is not None:
            row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :up_to]
            alone = len(self._in_work) == 1  # whoever else is in work would wait with this answer
            leave = partial(publish, serving, pool, self.rows, req, plan, up_to, row, wait=alone)
            self._guarded("publish", leave, None)

    def _note(self, req: Any, plan: Plan, up_to: int) -> None:
        """The rows computed since the last checkpoint lie on all that is before them."""
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :up_to]
        start = max(plan.noted, plan.reused)
        if start < up_to:
            self.rows.note(row[start:], self.rows.under(row[:start]))
            plan.noted = up_to

    # ---- the end of a request

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self._in_work.discard(req)
        self._guarded("on_release", lambda: self._forget(req), None)

    def _forget(self, req: Any) -> None:
        plan: Plan | None = getattr(req, PLAN, None)
        if plan is None:
            return
        if req.finished() and self.metrics is not None:
            handoff.finish(self.metrics, req.rid, plan)
            if plan.lossy and plan.report.mapped and self.serving is not None and self.background is not None:
                self.background.finished(req, plan)
        self._unstage(req, plan)
        if plan.slots is not None:
            self.token_to_kv_pool_allocator.free(plan.slots)
        setattr(req, PLAN, None)
        if plan.lossy:
            # a retracted request decides anew; a finished one is not looked up again
            req.cache_salt = plan.original_salt

    def write_backup_storage(self, node_id: Any) -> None:
        """Lossy pages never leave the process through SGLang's own storage backends."""
        if self._guarded("write_backup_storage", lambda: self._is_lossy(node_id), True):
            return
        super().write_backup_storage(node_id)

    def _is_lossy(self, node_id: Any) -> bool:
        salts = self._salts
        return salts is not None and any(
            salts.is_lossy(part)
            for part in self.tree_core.prefetch_anchor_info(node_id)
            if isinstance(part, str)
        )

    def _refresh(self, req: Any, plan: Plan) -> None:
        """Bring the response metadata up to date, in place."""
        if req.customized_info is not None and META_KEY in req.customized_info:
            req.customized_info[META_KEY] = [plan.report.as_meta()]
