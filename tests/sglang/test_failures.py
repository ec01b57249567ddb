"""The failure matrix, one fault a row: the answer is right, no slot is lost, the reason is counted."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.common import match_kv_cache
from support.faults import FaultyExchange
from support.pools import LARGE, SMALL, Engine, identity, mapped_rows, mapper_between, native_rows

from kvhub.exchange import BlockCorrupt, DirectoryExchange
from kvhub.model.identity import ModelIdentity
from kvhub_sglang.place import Pool

MAPPER = mapper_between(SMALL, LARGE)
PROMPT = [(i * 37 + 11) % 997 for i in range(200)]
ASK = {"reuse": True}


@dataclass
class World:
    """A source that has published PROMPT, and a target that may map it, over one exchange with faults."""

    root: Path
    exchange: FaultyExchange
    target: Engine
    settings: dict[str, Any] = field(default_factory=dict)

    def restart(self, **settings: Any) -> None:
        self.target = Engine(LARGE, self.root, (MAPPER,), exchange=self.exchange, **settings)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    root = tmp_path / "exchange"
    Engine(SMALL, root).run(PROMPT, 4)
    exchange = FaultyExchange(root)
    yield World(root, exchange, Engine(LARGE, root, (MAPPER,), exchange=exchange))
    exchange.release()


def rewrite(world: World, model: ModelIdentity) -> None:
    """Every block says it is another model's."""
    for path in world.root.rglob("*.kv"):
        data = path.read_bytes().replace(SMALL.digest.encode(), model.digest.encode(), 1)
        path.write_bytes(data)


def other_layout(world: World) -> None:
    """Every block of the source has one head more than the source has."""
    exchange = world.exchange.real
    for path in world.root.rglob("*.kv"):
        key = bytes.fromhex(path.stem)
        header = exchange.header(key)
        assert header is not None
        path.unlink()
        layout = header.layout.model_copy(update={"num_kv_heads": header.layout.num_kv_heads + 1})
        exchange.put(
            key,
            model=header.model,
            position=header.position,
            layout=layout,
            lineage=header.lineage,
            payload=torch.zeros(layout.shape),
        )


def linked(world: World) -> None:
    """Every shard directory is a link to one elsewhere."""
    for shard in [p for p in world.root.iterdir() if p.is_dir()]:
        moved = world.root.parent / f"moved-{shard.name}"
        shard.rename(moved)
        shard.symlink_to(moved)


def fails(method: str, error: Exception) -> Callable[[World], None]:
    return lambda world: world.exchange.fail.update({method: error})


def hangs(method: str) -> Callable[[World], None]:
    def fault(world: World) -> None:
        world.restart(stage_wait_ms=30, publish_wait_ms=20)
        world.exchange.hang.add(method)

    return fault


def full(world: World) -> None:
    world.exchange.fail["put"] = OSError(errno.ENOSPC, "No space left on device")


def unreadable(world: World) -> None:
    for path in world.root.rglob("*.kv"):
        path.write_bytes(b"")


def removed(world: World) -> None:
    shutil.rmtree(world.root)


def no_memory(world: World) -> None:
    world.restart(stage_max_bytes=1 << 16)
    world.target.serving.stager.budget.most = 10


GONE, DENIED = OSError(errno.EIO, "Input/output error"), PermissionError(errno.EACCES, "Permission denied")

FAULTS: dict[str, tuple[Callable[[World], None], str]] = {
    "header hangs": (hangs("header"), "slow"),
    "read hangs": (hangs("get"), "slow"),
    "header fails": (fails("header", GONE), "exchange"),
    "read fails": (fails("get", GONE), "exchange"),
    "read denied": (fails("get", DENIED), "exchange"),
    "read raises what it may not": (fails("get", RuntimeError("bug")), "internal"),
    "blocks corrupt": (fails("get", BlockCorrupt("checksum differs")), "corrupt"),
    "blocks of another revision": (lambda world: rewrite(world, identity("org/other", 3, 1)), "corrupt"),
    "blocks of another layout": (other_layout, "corrupt"),
    "blocks empty": (unreadable, "no_source"),
    "shards are links": (linked, "no_source"),
    "directory removed": (removed, "exchange"),
    "no memory to stage": (no_memory, "capacity"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_exchange_costs_the_reuse_alone(world: World, name: str) -> None:
    fault, reason = FAULTS[name]
    fault(world)
    target = world.target
    running = target.admit(target.request(PROMPT, ask=ASK))
    assert running.meta["mapped"] == 0 and running.meta["reason"] == reason
    torch.testing.assert_close(target.row(running, 200), native_rows(LARGE, PROMPT, range(200)))
    target.decode(running, 2)
    target.finish(running)
    assert target.cache.serving is not None  # one request's fault is not the process's
    world.exchange.release()
    target.empty()


def test_a_slow_exchange_is_waited_for_as_long_as_was_said(world: World) -> None:
    world.exchange.delay = {"header": 0.01, "get": 0.01}
    running = world.target.run(PROMPT, ask=ASK)
    assert running.meta["mapped"] == 192
    assert world.exchange.calls["get"] == 3 and running.meta["waited_ms"] >= 30  # three reads of 10 ms
    world.target.empty()


def test_one_prompt_several_answers(world: World) -> None:
    """Parallel sampling: the copies come at once, before anything is in the tree, or after."""
    target = world.target
    for round_, prompt in enumerate((PROMPT, [*PROMPT, 4])):
        copies = [target.admit(target.request(prompt, ask=ASK)) for _ in range(3)]
        mapped = mapped_rows(MAPPER, native_rows(SMALL, PROMPT[:192], range(192)), range(192))
        for copy in copies:
            assert copy.meta["mapped"] >= 192 and copy.loaded == (0 if round_ else 192)
            torch.testing.assert_close(target.row(copy, 192), mapped)
        for number, copy in enumerate(copies):
            target.decode(copy, 2 + number)
        target.drop(copies.pop(1))
        for copy in copies:
            target.finish(copy)
    target.empty()


@pytest.mark.parametrize("method", ["header", "put"])
def test_publishing_does_not_wait_for_a_hung_exchange(
    world: World, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.restart(publish_wait_ms=20)
    world.exchange.hang.add(method)
    waited: list[float] = []
    wait = threading.Event.wait

    def spy(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is not None and threading.current_thread() is threading.main_thread():
            waited.append(timeout)
        return wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", spy)
    for number in range(3):
        world.target.run([number, *PROMPT])
    assert set(waited) == {0.02} and len(waited) < 3  # whoever is behind others would wait in vain
    assert world.target.serving.publisher.workers.queued == 2
    world.target.empty()


def test_a_full_exchange_is_no_error_of_a_request(world: World) -> None:
    full(world)
    running = world.target.run(PROMPT, ask=ASK)
    assert running.meta["mapped"] == 192 and world.target.cache.serving is not None
    assert world.target.serving.publisher.budget.held == 0
    world.target.empty()


def test_a_removed_directory_comes_back_with_the_next_answer(world: World) -> None:
    source = Engine(SMALL, world.root)
    source.run(PROMPT)
    removed(world)
    assert world.target.run(PROMPT, ask=ASK).meta["reason"] == "exchange"
    source.cache.reset()
    source.allocator.clear()
    source.run([3, *PROMPT], 4)
    assert world.target.run([3, *PROMPT, 1], ask=ASK).meta["mapped"] == 192


def test_what_cannot_be_published_in_time_is_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.restart(publish_wait_ms=0)
    serving, read, dropped = world.target.serving, Pool.read, []
    serving.publisher.budget.most = serving.layout.nbytes * 2
    copies: list[int] = []

    def spy(pool: Pool, slots: torch.Tensor) -> torch.Tensor:
        copies.append(len(slots))
        return read(pool, slots)

    monkeypatch.setattr(Pool, "read", spy)
    monkeypatch.setattr(serving.metrics, "dropped", dropped.append)
    world.exchange.hang.add("put")
    for number in range(3):
        world.target.run([number, *PROMPT])
    blocks = len(PROMPT) // 64
    assert serving.publisher.budget.held == serving.layout.nbytes * 2
    assert len(copies) == 2  # no more than there is room for
    assert dropped == [blocks - 2, blocks, blocks]


def test_an_answer_waits_for_its_blocks_only_where_nobody_waits_with_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, waited = world.target, []
    publish = target.serving.publisher.publish

    def spy(*args: Any, wait: bool) -> int:
        waited.append(wait)
        return publish(*args, wait=wait)

    monkeypatch.setattr(target.serving.publisher, "publish", spy)
    runs = [target.admit(target.request([number, *PROMPT])) for number in range(3)]
    for running in runs:
        target.decode(running, 1)
    target.drop(runs.pop())  # aborted: it waits for nothing any more
    for running in runs:
        target.finish(running)
    assert waited == [False, True]


def test_the_exchange_is_asked_by_workers_alone(world: World) -> None:
    world.target.run(PROMPT, ask=ASK)
    assert world.exchange.threads == {"kvhub-stage-0", "kvhub-publish-0"} or world.exchange.threads == {
        "kvhub-stage-1",
        "kvhub-publish-0",
    }
    assert threading.current_thread().name not in world.exchange.threads


def test_others_pass_a_request_that_waits(world: World) -> None:
    target = world.target
    world.exchange.hang.add("get")
    slow = target.request(PROMPT, ask=ASK)
    target.cache.arrived(slow)
    assert target.cache.must_wait(slow)
    match_kv_cache(slow, target.cache)
    assert slow.host_hit_length == 0 and slow.cache_salt is None and target.cache.must_wait(slow)
    quick = target.run([5, *PROMPT])  # runs from arrival to end meanwhile
    assert quick.meta["reason"] == "not_asked"
    world.exchange.release()
    running = target.admit(slow)
    assert running.loaded == 192 and running.meta["waited_ms"] > 0
    mapped = mapped_rows(MAPPER, native_rows(SMALL, PROMPT[:192], range(192)), range(192))
    torch.testing.assert_close(target.row(running, 192), mapped)
    target.decode(running, 1)
    target.finish(running)
    target.empty()


def test_after_a_time_out_nobody_waits_for_a_while(world: World) -> None:
    world.restart(stage_wait_ms=20)
    world.exchange.hang.add("get")
    assert world.target.run(PROMPT, ask=ASK).meta["reason"] == "slow"
    req = world.target.request([7, *PROMPT[1:]], ask=ASK)
    world.target.cache.arrived(req)
    assert not world.target.cache.must_wait(req)
    world.target.serving.stager.breaker.succeeded()
    world.exchange.release()
    assert (
        world.target.run([*PROMPT, 1], ask=ASK).meta["mapped"] == 0
    )  # what is on the device is exact by now


def test_an_abort_while_waiting_gives_the_memory_back(world: World) -> None:
    target = world.target
    req = target.request(PROMPT, ask=ASK)
    target.match(req)
    assert target.serving.stager.budget.held > 0
    other = target.request([*PROMPT, 3], ask=ASK)
    world.exchange.hang.add("get")
    target.cache.arrived(other)
    for each in (req, other):
        target.cache.release_aborted_request(each.cache_request_handle)
    assert target.serving.stager.budget.held <= target.serving.layout.nbytes * 4  # the read that hangs
    world.exchange.release()
    deadline = time.monotonic() + 20
    while target.serving.stager.budget.held and time.monotonic() < deadline:
        time.sleep(0.01)
    assert target.serving.stager.budget.held == 0
    target.empty()


def test_rows_evicted_while_waiting(world: World) -> None:
    target = world.target
    target.run(PROMPT[:100])
    req = target.request([*PROMPT, 9], ask=ASK)
    world.exchange.hang.add("get")
    target.cache.arrived(req)
    target.cache.reset()
    target.allocator.clear()
    world.exchange.release()
    running = target.admit(req)
    assert running.meta["exact"] + running.meta["mapped"] + running.meta["prefilled"] == 201
    positions = range(running.device + running.loaded, 201)
    torch.testing.assert_close(
        target.row(running, 201)[:, :, positions.start :],
        native_rows(LARGE, [*PROMPT, 9][positions.start :], positions),
    )
    target.decode(running, 1)
    target.finish(running)
    target.check()


def test_links_are_not_written_through(tmp_path: Path) -> None:
    exchange = DirectoryExchange(tmp_path / "exchange")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for number in range(256):
        (exchange.root / f"{number:02x}").symlink_to(elsewhere)
    engine = Engine(SMALL, exchange.root)
    engine.run(PROMPT)
    assert not list(elsewhere.iterdir()) and engine.cache.serving is not None
