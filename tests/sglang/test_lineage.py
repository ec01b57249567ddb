"""What lies under a row is never understated, however requests branch, race, narrow and retract."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import match_kv_cache
from support.faults import FaultyExchange
from support.pools import LARGE, SMALL, Engine, Running, identity, mapper_between

from kvhub.exchange import DirectoryExchange, Lineage
from kvhub.mapper.ridge import RidgeMapper

ASK = {"reuse": True}
UP, DOWN = mapper_between(SMALL, LARGE), mapper_between(LARGE, SMALL)
PROMPT = [(i * 37 + 11) % 997 for i in range(200)]


def pair(root: Path, *, page_size: int = 1, max_hops: int = 2) -> tuple[Engine, Engine]:
    """A small and a large server that map from each other."""
    common: dict[str, Any] = {"page_size": page_size, "max_hops": max_hops}
    small = Engine(SMALL, root, (DOWN,), lineage_mappers=[UP.manifest.digest], **common)
    large = Engine(LARGE, root, (UP,), lineage_mappers=[DOWN.manifest.digest], **common)
    return small, large


def run(engine: Engine, tokens: list[int], count: int, **ask: Any) -> Running:
    return engine.run(tokens, count, ask={**ASK, **ask})


@pytest.fixture
def two_hops(tmp_path: Path) -> tuple[Engine, Engine, Running]:
    """The large server mapped blocks 1 and 2 of PROMPT from small; small holds block 0 alone."""
    small, large = pair(tmp_path / "exchange")
    small.run([*PROMPT[:64], 1], 1)
    return small, large, run(large, PROMPT, 2)


def test_a_branch_inside_a_block(two_hops: tuple[Engine, Engine, Running]) -> None:
    small, large, _ = two_hops
    back = run(small, [*PROMPT, 7], 2)
    assert back.meta["hops"] == 2
    branch = PROMPT[:120] + [900 + i for i in range(80)]
    large.run(branch, 1)
    # its rows 64..119 are those of `back`, two mappers deep
    again = run(small, [*branch, 1], 140)
    assert again.meta["hops"] == 2 and again.meta["exact"] == 64
    third = run(large, [*again.tokens, 9], 1)
    assert third.meta["mapped"] == 0 and third.meta["reason"] == "hops"


def test_a_narrower_policy_has_rows_of_its_own(two_hops: tuple[Engine, Engine, Running]) -> None:
    small, large, first = two_hops
    longer = run(large, first.tokens + list(range(80)), 4).tokens
    two = run(small, longer, 4)
    assert two.meta["hops"] == 2
    large.run(longer, 1)
    assert run(small, [*longer, 8], 4, max_hops=1).meta["hops"] == 1
    again = run(small, [*two.tokens, 3, 4], 140)
    assert again.meta["hops"] == 2
    assert run(large, [*again.tokens, 9], 1).meta["mapped"] == 0


def test_two_requests_in_flight_share_the_first_ones_rows(two_hops: tuple[Engine, Engine, Running]) -> None:
    small, large, first = two_hops
    tokens = first.tokens
    slow = small.admit(small.request([*tokens, 5], ask=ASK), chunk=4)
    assert slow.meta["hops"] == 2
    large.run(tokens, 1)
    quick = small.admit(small.request([*tokens, 6], ask=ASK))
    assert quick.meta["hops"] == 1
    small.extend(slow, 64)
    small.decode(slow, 2)
    small.decode(quick, 140)  # its checkpoint finds the tree filled by `slow`
    small.finish(slow)
    small.finish(quick)
    assert run(large, [*quick.tokens, 9], 1).meta["mapped"] == 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_match_without_a_limit(tmp_path: Path, page_size: int) -> None:
    """Cache-aware scheduling policies match the whole prompt, the last token included."""
    small, large = pair(tmp_path / "exchange", page_size=page_size)
    small.run([*PROMPT[:128], 1, 2], 1)
    run(large, PROMPT[:128], 8)
    req = large.request(PROMPT[:128], ask=ASK)
    large.match(req)
    match_kv_cache(req, large.cache, req.full_untruncated_fill_ids)
    assert large.cache.serving is not None
    running = large.admit(req)
    assert running.meta["mapped"] + running.meta["prefilled"] == 128
    large.drop(running)


def test_an_exact_prefix_that_was_evicted(tmp_path: Path) -> None:
    root = tmp_path / "exchange"
    Engine(SMALL, root).run(PROMPT, 4)
    large = Engine(LARGE, root, (mapper_between(SMALL, LARGE, exact_prefix=4),))
    large.run([*PROMPT[:10], 1, 2, 3], 1)
    req = large.request([*PROMPT, 9], ask=ASK)
    assert large.match(req) == 192
    large.cache.evict(EvictParams(num_tokens=10**6))
    running = large.admit(req)
    assert running.promised == 0 and running.meta["reason"] == "exact_prefix" and req.cache_salt is None
    large.decode(running, 1)
    large.finish(running)
    large.empty()


def test_another_mappers_rows_are_no_exact_prefix(tmp_path: Path) -> None:
    root = tmp_path / "exchange"
    third = identity("org/third", 3, 1)
    careful = mapper_between(third, LARGE, exact_prefix=4)
    large = Engine(LARGE, root, (UP, careful))
    Engine(SMALL, root).run([*PROMPT[:64], 1], 1)
    assert run(large, [*PROMPT[:65], 1], 1).meta["mapped"] == 64
    Engine(third, root).run(PROMPT, 1)
    refused = run(large, PROMPT, 1)
    assert refused.meta["reason"] == "exact_prefix" and refused.meta["prefilled"] >= 130


def test_a_retracted_request_reports_its_prompt_alone(tmp_path: Path) -> None:
    small, large = pair(tmp_path / "exchange")
    small.run(PROMPT, 4)
    running = large.admit(large.request(PROMPT, ask=ASK, new_tokens=80))
    large.decode(running, 70)
    large.drop(running)
    running.req.reset_for_retract()
    again = large.admit(running.req)
    meta = again.meta
    assert meta["exact"] + meta["mapped"] + meta["prefilled"] == 200
    large.drop(again)


def test_a_switch_off_between_promise_and_load(tmp_path: Path) -> None:
    small, large = pair(tmp_path / "exchange")
    small.run(PROMPT, 4)
    req = large.request(PROMPT, ask=ASK)
    assert large.match(req) == 192
    salt = large.serving.salts.lossy("0" * 32, None)
    large.cache.switch_off("test")
    running = large.admit(req)
    assert running.meta["mapped"] == 0 and running.meta["prefilled"] == 200
    forged = large.request(PROMPT, salt=salt)  # lossy rows may still be in the tree
    large.drop(large.admit(forged))
    assert not large.serving.salts.is_reserved(forged.cache_salt)
    large.drop(running)


def swapped(exchange: DirectoryExchange, source: Engine, position: int, lineage: Lineage) -> None:
    """Replace small's block at `position` by one with another lineage, valid in itself."""
    for path in exchange.root.rglob("*.kv"):
        key = bytes.fromhex(path.stem)
        header = exchange.header(key)
        if header is not None and header.model == SMALL.digest and header.position == position:
            block = exchange.get(key, model=SMALL.digest, layout=source.serving.layout)
            path.unlink()
            rows, layout = block.payload, header.layout
            exchange.put(
                key, model=SMALL.digest, position=position, layout=layout, lineage=lineage, payload=rows
            )


def test_a_block_replaced_between_look_up_and_read(tmp_path: Path) -> None:
    root = tmp_path / "exchange"
    exchange = FaultyExchange(root)
    small = Engine(SMALL, root)
    large = Engine(LARGE, root, (UP,), exchange=exchange)
    small.run(PROMPT, 4)

    def swap_once(method: str) -> None:
        if method == "get":
            exchange.before = lambda method: None
            swapped(exchange.real, small, 64, Lineage(hops=1, mappers=["e" * 64]))

    exchange.before = swap_once
    running = large.admit(large.request(PROMPT, ask=ASK))
    # the span ends before the block that is not what it was
    assert running.loaded == 64 and running.meta["mapped"] == 64 and running.meta["prefilled"] == 136
    large.drop(running)


def other_things(root: Path, kind: str) -> None:
    """Put something that is no block under the name of the third block of every chain."""
    for path in sorted(root.rglob("*.kv")):
        header = DirectoryExchange(root).header(bytes.fromhex(path.stem))
        if header is not None and header.position == 128:
            path.unlink()
            if kind == "fifo":
                os.mkfifo(path)
            elif kind == "directory":
                path.mkdir()
            else:
                path.symlink_to("/dev/zero")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["fifo", "directory", "link"])
def test_something_else_under_a_blocks_name_ends_the_span_there(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "exchange"
    small, large = pair(root)
    small.run(PROMPT, 4)
    other_things(root, kind)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for number in range(10):
        assert run(large, [*PROMPT, number], 1).meta["mapped"] >= 128
        large.cache.reset()
        large.allocator.clear()
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_a_header_that_says_255_hops_is_a_refusal(tmp_path: Path) -> None:
    root = tmp_path / "exchange"
    small, large = pair(root)
    small.run(PROMPT, 4)
    for path in root.rglob("*.kv"):
        data = path.read_bytes().replace(b'"hops":0', b'"hops":255', 1)
        size = int.from_bytes(data[8:12], "little") + 2
        text = data[12 : 12 + size].rstrip(b" ")
        text += b" " * (-(12 + len(text)) % 64)
        path.write_bytes(data[:8] + len(text).to_bytes(4, "little") + text + data[12 + size :])
    answer = run(large, PROMPT, 1)
    assert answer.meta["reason"] == "hops" and large.cache.serving is not None


def test_mappers_are_real() -> None:
    assert isinstance(UP, RidgeMapper) and UP.manifest.digest != DOWN.manifest.digest
