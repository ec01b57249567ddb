"""SGLang's radix tree, allocator and KV pool without a server, driven as its scheduler drives them.

`Engine` plays one model of `support.rows`, so a test can say of every row where it came from.
"""

from __future__ import annotations

import itertools
import os
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, match_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from support.rows import LARGE, SMALL, identity, mapped_rows, mapper_between, native_rows

from kvhub.exchange import DirectoryExchange, Exchange
from kvhub.exchange.shards import HeadSlice, ShardedExchange
from kvhub.mapper.narrow import narrow
from kvhub.mapper.ridge import RidgeMapper
from kvhub.model.identity import ModelIdentity
from kvhub_sglang.cache import KvhubRadixCache
from kvhub_sglang.handoff import late_plan
from kvhub_sglang.internal import InternalRequests
from kvhub_sglang.ranks import OneRank, Ranks
from kvhub_sglang.report import META_KEY, Metrics
from kvhub_sglang.serving import Candidate, Serving
from kvhub_sglang.settings import ServingSettings
from kvhub_sglang.tensor_parallel import join, publishes

__all__ = ["LARGE", "SMALL", "Engine", "Running", "identity", "mapped_rows", "mapper_between", "native_rows"]


@dataclass(eq=False)
class Running:
    """A request that holds its row."""

    req: Req
    device: int
    promised: int
    loaded: int
    serving: Serving

    @property
    def meta(self) -> dict[str, Any]:
        """Its report; of one that did not ask, before its first token, what that will be."""
        if self.req.customized_info is not None:
            return self.req.customized_info[META_KEY][0]  # type: ignore[no-any-return]
        late = late_plan(self.serving, self.req, "")
        assert late is not None
        return late.report.as_meta()

    @property
    def tokens(self) -> list[int]:
        """Prompt and answer."""
        return [*self.req.origin_input_ids, *self.req.output_ids]


class Engine:
    """One server's cache. Every step checks that no slot is lost or counted twice."""

    SETTINGS: ClassVar[dict[str, Any]] = {"worth": "always", "stage_wait_ms": 20000, "publish_wait_ms": 5000}
    """Unless a test says otherwise: nothing depends on how fast the machine is."""

    def __init__(
        self,
        model: ModelIdentity,
        root: Path,
        mappers: tuple[RidgeMapper, ...] = (),
        *,
        page_size: int = 1,
        slots: int = 2048,
        draft: bool = True,
        start: bool = True,
        internal: bool = False,
        exchange: Exchange | None = None,
        ranks: Ranks | None = None,
        **settings: Any,
    ) -> None:
        """ranks: this is one rank of a tensor-parallel server (`OneRank()`: it reads such a server's)."""
        set_global_server_args_for_scheduler(
            ServerArgs(model_path="dummy", page_size=page_size, device="cpu")
        )
        torch.set_num_threads(1)
        self.model, self.page_size, self.capacity = model, page_size, slots
        g = model.geometry
        self.heads = HeadSlice.everything(g.num_kv_heads)
        if ranks is not None:
            self.heads = HeadSlice.of_rank(ranks.rank, ranks.size, g.num_kv_heads)
        self.rows = ReqToTokenPool(size=16, max_context_len=4096, device="cpu", enable_memory_saver=False)
        self.kv = MHATokenToKVPool(
            size=slots,
            page_size=page_size,
            dtype=torch.float32,
            head_num=self.heads.count,
            head_dim=g.head_dim,
            layer_num=g.num_layers,
            device="cpu",
            enable_memory_saver=False,
        )
        common = {
            "size": slots,
            "dtype": torch.float32,
            "device": "cpu",
            "kvcache": self.kv,
            "need_sort": False,
        }
        self.allocator = (
            TokenToKVPoolAllocator(**common)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(page_size=page_size, **common)
        )
        self.cache = KvhubRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.free_at_start = self.allocator.available_size()
        candidates = tuple(
            Candidate(
                narrow(m, self.heads),
                m.manifest.digest,
                m.manifest.source,
                draft,
                first_head=self.heads.first,
            )
            for m in mappers
        )
        where = exchange or DirectoryExchange(root)
        if ranks is not None:
            needs = {c.source_digest: c.source_heads for c in candidates} | {model.digest: self.heads}
            first = publishes(ranks, g.num_kv_heads)
            where = ShardedExchange(where, needs, self.heads, publishes=first)
        self.serving = Serving(
            settings=ServingSettings(**{"exchange": str(root), **self.SETTINGS, **settings}),
            identity=model,
            candidates=candidates,
            exchange=where,
            page_size=page_size,
            metrics=Metrics(False),
            internal=InternalRequests() if internal else None,
            ranks=ranks or OneRank(),
            heads=self.heads.count,
        )
        join(self.serving)
        if start:
            self.cache.serve(self.serving)
        self._ids = itertools.count()
        self._running: list[Running] = []

    # ---- the scheduler's steps

    def request(
        self,
        tokens: list[int],
        *,
        ask: dict[str, Any] | None = None,
        salt: str | None = None,
        new_tokens: int = 4,
    ) -> Req:
        params = SamplingParams(max_new_tokens=new_tokens, custom_params={"kvhub": ask} if ask else None)
        req = Req(f"r{next(self._ids)}", "", array("q", tokens), params)
        req.cache_salt = salt
        return req

    def match(self, req: Req, *, passes: int = 1000) -> int:
        """Scheduling passes until the request need not wait for its blocks; tokens promised."""
        req.refresh_fill_ids()
        for _ in range(passes):
            match_kv_cache(
                req,
                self.cache,
                req.full_untruncated_fill_ids,
                max_prefix_len=req._compute_max_prefix_len(len(req.full_untruncated_fill_ids)),
            )
            if not self.cache.must_wait(req):
                return int(req.host_hit_length)
            self.cache.wait_for_stage(0.01)
            self.serve_itself()
        raise AssertionError("the request still waits")

    def serve_itself(self, *, idle: bool = False) -> int:
        """Run the requests that the server wants to make to itself now; how many."""
        taken = self.cache.take_internal(lambda: idle)
        for wanted in taken:
            req = self.request(list(wanted.tokens), salt=wanted.salt, new_tokens=1)
            req.rid, req.extra_key = wanted.rid, wanted.extra_key
            self.cache.arrived(req)
            running = self.admit(req)
            if wanted.top:
                req.logprob.output_top_logprobs_val, req.logprob.output_top_logprobs_idx = self.answer(req)
            self.decode(running, 1)
            self.finish(running)
            assert self.cache.keep_internal([req]) == []
        return len(taken)

    def answer(self, req: Req) -> tuple[list[list[float]], list[list[int]]]:
        """Log-probabilities after the prompt: a function of the last row the request has."""
        row = self.rows.req_to_token[req.kv.req_pool_idx, : req.extend_end].long()
        seen = self.kv.k_buffer[-1][row].sum(0).flatten()
        values = torch.log_softmax(seen, 0)
        order = values.argsort(descending=True)
        return [values[order].tolist()], [order.tolist()]

    def admit(self, req: Req, chunk: int | None = None) -> Running:
        """Match, load, allocate a row and prefill the first chunk (all of it by default)."""
        tokens = list(req.origin_input_ids) + list(req.output_ids)
        self.match(req)
        req.kv.cache_protected_len = req.prefix_len
        device, promised = req.prefix_len, req.host_hit_length
        if promised:
            lock = self.cache.lock(req.best_match_node)
            loaded = self.cache.init_load_back(
                InitLoadBackParams(best_match_node=req.best_match_node, host_hit_length=promised, req=req)
            )
            self.cache.unlock(lock)
            assert loaded is not None
            req.host_loaded_length, req.last_node = loaded
            assert req.host_loaded_length in (0, promised)  # anything else ends SGLang's scheduler
            req.prefix_len += req.host_loaded_length
            if self.cache.load_back_is_cache_owned():
                req.kv.cache_protected_len = req.prefix_len
        req.cached_tokens = req.prefix_len
        req.lock = self.cache.lock(req.last_node)
        prefix = (
            self.cache.prefix_device_indices(req) if req.prefix_len else torch.empty(0, dtype=torch.int64)
        )
        req.kv.req_pool_idx = self.rows.alloc([req])[0]
        self.rows.write((req.kv.req_pool_idx, slice(0, req.prefix_len)), prefix.to(torch.int32))
        self._compute(req, tokens, req.prefix_len, min(len(tokens), req.prefix_len + (chunk or len(tokens))))
        loaded = req.host_loaded_length if promised else 0
        self._running.append(Running(req, device, promised, loaded, self.serving))
        self.check()
        return self._running[-1]

    def extend(self, running: Running, chunk: int) -> None:
        """Prefill the next chunk of a chunked request, after the checkpoint SGLang makes."""
        req = running.req
        checkpoint_kv_cache(req, self.cache)
        tokens = list(req.origin_input_ids) + list(req.output_ids)
        self._compute(req, tokens, req.prefix_len, min(len(tokens), req.prefix_len + chunk))

    def decode(self, running: Running, count: int) -> None:
        """Generate `count` tokens, each a fixed function of the one before."""
        req = running.req
        if not req.output_ids:
            checkpoint_kv_cache(req, self.cache)
        for _ in range(count):
            tokens = list(req.origin_input_ids) + list(req.output_ids)
            if req.output_ids:
                self._compute(req, tokens, len(tokens) - 1, len(tokens))
            req.output_ids.append((tokens[-1] * 7 + 1) % 1000)

    def finish(self, running: Running) -> None:
        req = running.req
        req.finished_reason, req.finished_len = FINISH_LENGTH(1), len(req.output_ids)
        release_kv_cache(req, self.cache, checkpoint=True)
        self._running.remove(running)
        self._written()
        self.check()

    def _written(self) -> None:
        """Wait for the writer, which an answer does not where it is behind; not for one that hangs."""
        serving, until = self.cache.serving, time.monotonic() + 0.5
        while serving is not None and time.monotonic() < until:
            workers = serving.publisher.workers
            if not workers.queued and not workers._busy_since:
                return
            time.sleep(0.001)

    def drop(self, running: Running) -> None:
        """Abort or retract: release without a checkpoint."""
        release_kv_cache(running.req, self.cache, checkpoint=False)
        self._running.remove(running)
        self.check()

    def run(self, tokens: list[int], count: int = 1, **kwargs: Any) -> Running:
        """A whole request, its prompt's rows kept in `row` before it is released."""
        running = self.admit(self.request(tokens, **kwargs))
        self.decode(running, count)
        self.finish(running)
        return running

    # ---- what the tests look at

    def row(self, running: Running, stop: int) -> torch.Tensor:
        """Rows of the first `stop` tokens: `[layers, 2, stop, heads, 8]`."""
        slots = self.rows.req_to_token[running.req.kv.req_pool_idx, :stop].long()
        return torch.stack(
            [
                torch.stack((k[slots], v[slots]))
                for k, v in zip(self.kv.k_buffer, self.kv.v_buffer, strict=True)
            ]
        )

    def check(self) -> None:
        """free + evictable + protected + held by running requests alone = the pool."""
        tree = self.cache.evictable_size() + self.cache.protected_size()
        private = 0
        for running in self._running:
            kv = running.req.kv
            pages = -(-kv.kv_allocated_len // self.page_size) * self.page_size
            private += pages - kv.cache_protected_len
        assert self.allocator.available_size() + tree + private == self.free_at_start

    def empty(self) -> None:
        """Evict everything; every slot must come back, each once."""
        self.cache.evict(EvictParams(num_tokens=10**6))
        assert self.cache.protected_size() == 0
        assert self.allocator.available_size() == self.free_at_start
        slots = self.allocator.alloc(self.free_at_start)
        assert slots is not None and slots.unique().numel() == self.free_at_start
        self.allocator.free(slots)

    def native(self, tokens: list[int], positions: range) -> torch.Tensor:
        """What this engine's model computes at `positions` of `tokens`."""
        rows = native_rows(self.model, tokens[positions.start : positions.stop], positions)
        return rows[:, :, :, self.heads.first : self.heads.first + self.heads.count]

    def _compute(self, req: Req, tokens: list[int], start: int, stop: int) -> None:
        """The forward: native rows for `[start, stop)` into new slots."""
        allocated = req.kv.kv_allocated_len or start
        need = -(-stop // self.page_size) * self.page_size - -(-allocated // self.page_size) * self.page_size
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        if need > 0:
            if self.allocator.available_size() < need:
                self.cache.evict(EvictParams(num_tokens=need))
            fresh = self.allocator.alloc(need)
            assert fresh is not None
            first = -(-allocated // self.page_size) * self.page_size
            row[first : first + need] = fresh.to(torch.int32)
        slots = row[start:stop].long()
        rows = self.native(tokens, range(start, stop))
        for layer in range(self.model.geometry.num_layers):
            self.kv.k_buffer[layer][slots] = rows[layer, 0]
            self.kv.v_buffer[layer][slots] = rows[layer, 1]
        req.kv.kv_allocated_len = req.kv.kv_committed_len = stop
        req.extend_end = stop
