"""The situations in which a radix-cache extension loses slots or ends the scheduler.

After each, free + evictable + protected equals the pool (`Engine.check`), and
evicting everything gives every slot back exactly once (`Engine.empty`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pools import LARGE, SMALL, Engine, mapped_rows, mapper_between, native_rows

from kvhub_sglang import cache as cache_module

MAPPER = mapper_between(SMALL, LARGE)
PROMPT = [(i * 37 + 11) % 997 for i in range(200)]
ASK = {"reuse": True}


@pytest.fixture(params=[1, 16])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    root = tmp_path / "exchange"
    Engine(SMALL, root, page_size=request.param).run(PROMPT, 4)
    return Engine(LARGE, root, (MAPPER,), page_size=request.param)


def native_answer(engine: Engine, running: Any) -> None:
    """The request was prefilled: its rows are the model's own, and nothing was lost."""
    assert running.meta["mapped"] == 0 and running.meta["prefilled"] == 200 - running.meta["exact"]
    torch.testing.assert_close(engine.row(running, 200), native_rows(LARGE, PROMPT, range(200)))
    engine.decode(running, 3)
    engine.finish(running)
    engine.empty()


def test_small_chunks(target: Engine) -> None:
    running = target.admit(target.request([*PROMPT, *range(100)], ask=ASK), chunk=32)
    while running.req.extend_end < 300:
        target.extend(running, 32)
    assert running.meta["mapped"] == 192 and running.meta["prefilled"] == 108
    mapped = mapped_rows(MAPPER, native_rows(SMALL, PROMPT[:192], range(192)), range(192))
    torch.testing.assert_close(target.row(running, 192), mapped)
    target.decode(running, 5)
    target.finish(running)
    target.empty()


@pytest.mark.parametrize("chunk", [None, 4])
def test_abort_in_mid_prefill(target: Engine, chunk: int | None) -> None:
    running = target.admit(target.request(PROMPT, ask=ASK), chunk=chunk)
    assert running.loaded == 192
    target.drop(running)
    target.empty()


def test_abort_while_waiting(target: Engine) -> None:
    req = target.request(PROMPT, ask=ASK)
    req.refresh_fill_ids()
    for _ in range(3):  # every scheduling pass of a waiting request matches again
        cache_module_match(target, req)
    assert target.serving.stager.budget.held > 0
    target.cache.release_aborted_request(req.cache_request_handle)
    target.check()
    target.empty()


def cache_module_match(engine: Engine, req: Any) -> int:
    return engine.match(req)


def test_retraction_matches_anew(target: Engine) -> None:
    running = target.admit(target.request(PROMPT, ask=ASK))
    target.decode(running, 6)
    target.drop(running)
    req = running.req
    assert req.cache_salt is None  # free to decide again
    req.reset_for_retract()
    again = target.admit(req)
    assert again.meta["mapped"] > 0
    target.decode(again, 2)
    target.finish(again)
    target.empty()


def test_flush_between_requests(target: Engine) -> None:
    target.run(PROMPT, ask=ASK)
    target.cache.reset()
    target.allocator.clear()
    assert target.run(PROMPT, ask=ASK).meta["mapped"] == 192
    target.check()


def test_flush_while_a_request_waits(target: Engine) -> None:
    req = target.request(PROMPT, ask=ASK)
    req.refresh_fill_ids()
    assert cache_module_match(target, req) == 192
    target.cache.reset()
    target.allocator.clear()
    running = target.admit(req)
    assert running.meta["mapped"] == 192
    target.decode(running, 1)
    target.finish(running)
    target.empty()


def test_no_free_slots(tmp_path: Path) -> None:
    root = tmp_path / "exchange"
    Engine(SMALL, root).run(PROMPT, 4)
    target = Engine(LARGE, root, (MAPPER,), slots=256)
    blocker = target.admit(target.request([7] * 100))
    running_req = target.request(PROMPT, ask=ASK)
    running_req.refresh_fill_ids()
    assert cache_module_match(target, running_req) == 192
    from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

    loaded = target.cache.init_load_back(
        InitLoadBackParams(best_match_node=running_req.best_match_node, host_hit_length=192, req=running_req)
    )
    assert loaded == (0, running_req.last_node)
    assert running_req.customized_info["kvhub"][0]["reason"] == "capacity"
    assert running_req.cache_salt is None
    target.drop(blocker)
    target.empty()


def test_the_exchange_is_gone(target: Engine) -> None:
    shutil.rmtree(target.serving.exchange.root)
    running = target.admit(target.request(PROMPT, ask=ASK))
    assert running.meta["reason"] == "exchange"
    native_answer(target, running)


def test_what_is_promised_is_in_memory(target: Engine) -> None:
    """Blocks that vanish between promise and load cost nothing."""
    req = target.request(PROMPT, ask=ASK)
    assert cache_module_match(target, req) == 192
    shutil.rmtree(target.serving.exchange.root)
    running = target.admit(req)
    assert running.promised == running.loaded == 192
    assert target.serving.stager.budget.held == 0
    mapped = mapped_rows(MAPPER, native_rows(SMALL, PROMPT[:192], range(192)), range(192))
    torch.testing.assert_close(target.row(running, 192), mapped)
    target.decode(running, 1)
    target.finish(running)
    target.empty()


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[-5] ^= 1
    elif how == "truncate":
        del data[-100:]
    elif how == "extend":
        data += b"\0"
    elif how == "header":
        data[20] ^= 0xFF
    elif how == "swap":
        other = next(p for p in path.parent.parent.rglob("*.kv") if p != path)
        data = bytearray(other.read_bytes())
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "truncate", "extend", "header", "swap"])
def test_a_damaged_block_is_never_served(target: Engine, how: str) -> None:
    for path in target.serving.exchange.root.rglob("*.kv"):
        damage(path, how)
    running = target.admit(target.request(PROMPT, ask=ASK))
    reasons = {"header": "no_source", "swap": "no_source"}
    assert running.loaded == 0 and running.meta["reason"] == reasons.get(how, "corrupt")
    native_answer(target, running)


def test_a_mapper_that_gives_nan(tmp_path: Path) -> None:
    root = tmp_path / "exchange"
    Engine(SMALL, root).run(PROMPT, 4)
    broken = mapper_between(SMALL, LARGE)
    broken._tensors["layers.1.v.bias"][0, 0] = float("nan")
    target = Engine(LARGE, root, (broken,))
    running = target.admit(target.request(PROMPT, ask=ASK))
    assert running.loaded == 0 and running.meta["reason"] == "not_finite"
    native_answer(target, running)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("cache", "_plan"),
        ("cache", "_promise"),
        ("cache", "_load"),
        ("module", "publish"),
        ("cache", "_forget"),
        ("cache", "_poll"),
        ("cache", "_unstage"),
        ("handoff", "poll"),
        ("handoff", "compose"),
        ("cache", "_is_lossy"),
        ("handoff", "new_plan"),
        ("handoff", "promise"),
        ("handoff", "place"),
        ("handoff", "account"),
        ("cache", "_note"),
        ("handoff", "finish"),
    ],
)
def test_an_exception_anywhere_switches_off_and_prefills(
    target: Engine, monkeypatch: pytest.MonkeyPatch, owner: str, name: str
) -> None:
    def explode(*args: object, **kwargs: object) -> None:
        raise RuntimeError("injected")

    before = target.admit(target.request([*PROMPT, 8], ask=ASK))  # a handoff in flight meets the fault later
    where: Any = {"cache": target.cache, "module": cache_module, "handoff": cache_module.handoff}[owner]
    monkeypatch.setattr(where, name, explode)
    if name == "_is_lossy":
        target.cache.write_backup_storage(0)
    running = target.admit(target.request(PROMPT, ask=ASK))
    assert running.loaded in (0, 192)
    if running.loaded == 0:
        torch.testing.assert_close(
            target.row(running, 200)[:, :, running.device :],
            native_rows(LARGE, PROMPT[running.device :], range(running.device, 200)),
        )
    for each in (running, before):
        target.decode(each, 2)
        target.finish(each)
    assert target.cache.serving is None and "injected" not in target.cache.off_because
    monkeypatch.undo()
    after = target.admit(target.request([1, *PROMPT[1:]], ask=ASK))
    assert after.promised == 0
    torch.testing.assert_close(target.row(after, 200), native_rows(LARGE, [1, *PROMPT[1:]], range(200)))
    target.decode(after, 1)
    target.finish(after)
    target.empty()


def test_a_full_exchange_costs_nothing(target: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(target.serving.exchange, "put", full)
    running = target.run(PROMPT, ask=ASK)
    assert running.meta["mapped"] == 192 and target.cache.serving is not None
    target.empty()


def test_many_requests_at_once(target: Engine) -> None:
    running = [
        target.admit(target.request([*PROMPT, i, i + 1], ask=ASK if i % 2 else None)) for i in range(6)
    ]
    for each in running:
        target.decode(each, 3)
    for i, each in enumerate(running):
        (target.finish if i % 3 else target.drop)(each)
    target.empty()
