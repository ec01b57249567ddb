"""The part of the cache that SGLang's queue meets: arrivals, requests that wait, requests of our own.

Also what is looked up for them in tree and pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvhub_sglang.choice import silent
from kvhub_sglang.decide import Held
from kvhub_sglang.internal import Internal
from kvhub_sglang.plan import Plan

if TYPE_CHECKING:
    from kvhub_sglang.background import Background
    from kvhub_sglang.serving import Serving

PLAN = "kvhub_plan"
"""The attribute of SGLang's `Req` that holds its plan."""


class QueueingCache(UnifiedRadixCache):  # type: ignore[misc]
    """Called by the hooks on SGLang's queue; `KvhubRadixCache` has the rest."""

    serving: Serving | None
    background: Background | None

    # ---- waiting: blocks are read while the request is in the queue

    def arrived(self, req: Any) -> None:
        """A request was queued: begin to read its blocks before its first scheduling pass."""
        own = self._internal(req.rid)
        if own is not None:
            req.skip_radix_cache_insert = req.skip_radix_cache_insert or not own.insert
        elif self.serving is not None and getattr(req, PLAN, None) is None and not req.finished():
            self._guarded("arrived", lambda: self._arrive(req), None)

    def _arrive(self, req: Any) -> None:
        if self.serving is not None and silent(req, self.serving.settings):
            return  # `_plan` looks at its salt
        tokens = req.origin_input_ids + req.output_ids
        # as in SGLang's init_next_round_input, which has not run yet
        limit = req._compute_max_prefix_len(len(tokens))
        key = RadixKey(tokens, req.extra_key, limit=limit, cache_salt=req.cache_salt)
        self._plan(req, key)

    def must_wait(self, req: Any) -> bool:
        """Whether the request is to be passed over in this scheduling pass."""
        plan: Plan | None = getattr(req, PLAN, None)
        return plan is not None and plan.waiting and self.serving is not None

    def wait_for_stage(self, seconds: float) -> None:
        """Give the readers the processor while nothing else is to be run."""
        if self.serving is not None:
            self.serving.stager.wait(seconds)

    # ---- requests to ourselves

    def take_internal(self, is_idle: Callable[[], bool]) -> list[Internal]:
        """Requests to send to ourselves in this pass. is_idle: whether nothing else is to be done."""
        if self.serving is None or self.background is None:
            return []
        background = self.background
        taken: list[Internal] = self._guarded("take_internal", lambda: background.take(is_idle), [])
        return taken

    def keep_internal(self, reqs: list[Any]) -> list[Any]:
        """Answers that are to be sent: those of internal requests end here."""
        return reqs if self.background is None else self.background.keep(reqs)

    def _internal(self, rid: str) -> Internal | None:
        return None if self.background is None else self.background.internal.get(rid)

    # ---- what the tree and the pool hold

    def _device_match(self, req: Any, key: RadixKey, salt: str | None) -> MatchResult:
        probe = RadixKey(key.token_ids, key.extra_key, limit=limit_of(req, key), cache_salt=salt)
        return super().match_prefix(MatchPrefixParams(key=probe))

    def _held(self, req: Any, key: RadixKey, salt: str | None) -> Held:
        found = self._device_match(req, key, salt)
        return Held(found.device_prefix_len, found.host_hit_length)

    def _exact_match(self, tokens: Any, salt: str | None, extra_key: str | None) -> int:
        key = RadixKey(tokens, extra_key, cache_salt=salt)
        return int(super().match_prefix(MatchPrefixParams(key=key)).device_prefix_len)

    def _room(self) -> int:
        return int(self.token_to_kv_pool_allocator.available_size())

    def _allocate(self, count: int) -> torch.Tensor | None:
        allocator = self.token_to_kv_pool_allocator
        missing = count - allocator.available_size()
        if missing > 0:
            self.evict(EvictParams(num_tokens=missing))
        slots = allocator.alloc(count)
        return None if slots is None else slots.to(torch.int64)


def limit_of(req: Any, key: RadixKey) -> int:
    """Reusable tokens, as SGLang itself will cap them: prompt log-probabilities, the last token."""
    return min(len(key), int(req._compute_max_prefix_len(len(key.token_ids))))
