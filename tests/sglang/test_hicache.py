"""SGLang's host cache (L2) and storage (L3) beside kvhub, on real pools: lossy stays lossy in all tiers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from support.pools import LARGE, SMALL, Engine, mapped_rows, mapper_between, native_rows

MAPPER = mapper_between(SMALL, LARGE)
PROMPT = [(i * 37 + 11) % 997 for i in range(200)]
ASK = {"reuse": True}
PAGE = 16


class HostEngine(Engine):
    """An engine with SGLang's hierarchical cache below the pool, driven as its scheduler drives it."""

    def __init__(self, root: Path, *, storage: Path | None = None, **settings: Any) -> None:
        pytest.importorskip("kvhub_sglang_cpu.hicache").register()  # host memory without CUDA
        super().__init__(LARGE, root, (MAPPER,), page_size=PAGE, start=False, **settings)
        more: dict[str, Any] = {}
        if storage is not None:
            more = {"hicache_storage_backend": "file", "file_storage_path": str(storage)}
        arguments = ServerArgs(
            model_path="dummy",
            page_size=PAGE,
            device="cpu",
            enable_hierarchical_cache=True,
            hicache_ratio=2.0,
            hicache_io_backend="direct",
            hicache_mem_layout="page_first_direct",
            hicache_write_policy="write_through",
            **more,
        )
        set_global_server_args_for_scheduler(arguments)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
        )
        base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # SGLang keeps 10 GiB free; this takes two MiB
        alone = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank", "attn_tp_rank", "attn_dp_rank"), 0)
        with get_parallel().override(**alone):
            self.cache.init_hicache(arguments, params)
        self.cache.serve(self.serving)

    def to_host(self) -> None:
        """All rows are copied to the host, and leave the device."""
        until = time.monotonic() + 20
        self.cache.check_hicache_events()
        while (self.cache.ongoing_write_through or self.cache.ongoing_load_back) and time.monotonic() < until:
            time.sleep(0.002)
            self.cache.check_hicache_events()
        self.cache.evict(EvictParams(num_tokens=10**6))
        assert self.allocator.available_size() == self.free_at_start

    def _compute(self, *args: Any) -> None:
        self.cache.ready_to_load_host_cache()  # the loads of this batch begin, as before a forward
        super()._compute(*args)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    Engine(SMALL, tmp_path / "exchange", page_size=PAGE).run(PROMPT, 4)
    return tmp_path / "exchange"


def test_lossy_rows_come_back_from_the_host_as_lossy_rows(root: Path) -> None:
    target = HostEngine(root)
    first = target.run(PROMPT, 10, ask=ASK)
    assert first.meta["mapped"] == 192
    target.to_host()
    again = target.admit(target.request([*first.tokens, 3], ask=ASK))
    assert again.meta["reason"] == "hicache" and again.meta["exact"] == 0
    assert again.loaded == again.meta["mapped"] == 208
    rows = torch.cat(
        [
            mapped_rows(MAPPER, native_rows(SMALL, PROMPT[:192], range(192)), range(192)),
            native_rows(LARGE, first.tokens[192:208], range(192, 208)),
        ],
        dim=2,
    )
    torch.testing.assert_close(target.row(again, 208), rows)
    target.decode(again, 70)
    target.finish(again)
    exchange = target.serving.exchange
    blocks = [exchange.header(bytes.fromhex(p.stem)) for p in root.rglob("*.kv")]
    hops = {h.position: h.lineage.hops for h in blocks if h is not None and h.model == LARGE.digest}
    assert hops == {0: 1, 64: 1, 128: 1, 192: 1}  # nothing that was loaded passes for exact
    target.to_host()


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_an_exact_request_never_loads_them(root: Path, salt: str | None) -> None:
    target = HostEngine(root)
    assert target.run(PROMPT, 4, ask=ASK).meta["mapped"] == 192
    target.to_host()
    for ask in (None, {"reuse": False}):
        plain = target.admit(target.request(PROMPT, ask=ask, salt=salt))
        assert plain.promised == plain.device == 0
        torch.testing.assert_close(target.row(plain, 200), native_rows(LARGE, PROMPT, range(200)))
        target.drop(plain)
    target.to_host()


@pytest.mark.parametrize("publish", ["all", "none"])
def test_exact_rows_on_the_host_win_over_mapping(root: Path, publish: str) -> None:
    target = HostEngine(root, publish=publish)
    target.run(PROMPT, 4)
    target.to_host()
    again = target.admit(target.request([*PROMPT, 5], ask=ASK))
    assert again.loaded == again.meta["exact"] == 192 and again.meta["reason"] == "hicache"
    torch.testing.assert_close(target.row(again, 201), native_rows(LARGE, [*PROMPT, 5], range(201)))
    target.decode(again, 1)
    target.finish(again)
    target.to_host()


def test_a_little_on_the_host_does_not_stand_in_the_way(root: Path) -> None:
    target = HostEngine(root)
    target.run(PROMPT[:40], 1)
    target.to_host()
    running = target.admit(target.request(PROMPT, ask=ASK))
    assert running.loaded == running.meta["mapped"] == 192
    mapped = mapped_rows(MAPPER, native_rows(SMALL, PROMPT[:192], range(192)), range(192))
    torch.testing.assert_close(target.row(running, 192), mapped)
    target.decode(running, 1)
    target.finish(running)
    target.to_host()


def test_lossy_pages_are_not_written_to_storage(root: Path, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    target = HostEngine(root, storage=storage)
    try:
        target.run(PROMPT, 4, ask=ASK)
        target.to_host()
        assert pages(target, storage, 0) == 0
        target.run([7, *PROMPT[1:]], 4)
        target.to_host()
        assert pages(target, storage, 12) == 12
    finally:
        target.cache.shutdown()  # its threads


def pages(target: HostEngine, storage: Path, wanted: int) -> int:
    """Pages in the storage, after it had time to be written."""
    until = time.monotonic() + (5 if wanted else 0.5)
    while time.monotonic() < until:
        target.cache.check_hicache_events()
        found = sum(path.is_file() for path in storage.rglob("*"))
        if wanted and found >= wanted:
            break
        time.sleep(0.01)
    return found
