"""Headers are asked for in runs: few calls for a long history, few in vain for a short one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.faults import FaultyExchange
from support.pools import LARGE, SMALL, Engine, identity, mapper_between

from kvhub.exchange import BlockHeader, Lineage, Namespace, chain_keys
from kvhub_sglang.lookup import runs

UP, DOWN = mapper_between(SMALL, LARGE), mapper_between(LARGE, SMALL)
THIRD = identity("org/third", 3, 1)
SIDE = mapper_between(THIRD, LARGE)
BLOCKS = 30
PROMPT = [(i * 37 + 11) % 997 for i in range(BLOCKS * 64 + 8)]
ASK = {"reuse": True}


class Counting(FaultyExchange):
    """Notes the keys of each call for headers."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[int] = []

    def headers(self, keys: Any) -> list[BlockHeader | None]:
        self.asked.append(len(keys))
        found: list[BlockHeader | None] = super().headers(keys)
        return found


def target(root: Path, *mappers: Any, **settings: Any) -> tuple[Engine, Counting]:
    exchange = Counting(root)
    settings = {"publish": "none", "slots": 4096, **settings}
    return Engine(LARGE, root, mappers or (UP,), exchange=exchange, **settings), exchange


def remove(root: Path, model: Any, index: int) -> None:
    key = chain_keys(Namespace(model.digest, "exact"), PROMPT)[index]
    [path] = root.rglob(f"{key.hex()}.kv")
    path.unlink()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    Engine(SMALL, tmp_path / "exchange", slots=4096).run(PROMPT)
    return tmp_path / "exchange"


def test_a_long_history_costs_few_calls(root: Path) -> None:
    engine, exchange = target(root)
    assert engine.run(PROMPT, ask=ASK).meta["mapped"] == BLOCKS * 64
    # 8 own that are not there; then 8, 16 and 6 of the source
    assert exchange.asked == [8, 8, 16, 6] and exchange.calls["header"] == 0
    assert exchange.calls["get"] == BLOCKS
    engine.empty()


@pytest.mark.parametrize("found", [0, 1, 7, 8, 9, 23, 24, 29])
def test_a_short_history_costs_few_in_vain(root: Path, found: int) -> None:
    remove(root, SMALL, found)
    engine, exchange = target(root, min_span=1)
    meta = engine.run(PROMPT, ask=ASK).meta
    assert meta["mapped"] == found * 64
    if not found:
        assert meta["reason"] == "no_source" and "block 0" in meta["detail"]
    assert sum(exchange.asked) <= 8 + 2 * found + 8 + 1  # own in vain, the runs, one lossy header
    assert exchange.calls["get"] == found


def test_sources_fill_each_others_gaps(root: Path) -> None:
    Engine(THIRD, root, slots=4096).run(PROMPT)
    for index in (0, 3, 9, 20):
        remove(root, SMALL, index)
    for index in (1, 2, 10, 19):
        remove(root, THIRD, index)
    engine, exchange = target(root, UP, SIDE)
    req = engine.request(PROMPT, ask=ASK)
    running = engine.admit(req)
    assert running.meta["mapped"] == BLOCKS * 64 and running.meta["hops"] == 1
    used = {i: s.candidate.source.name for i, s in req.kvhub_plan.blocks.items()}
    # the first named mapper wherever it can be had
    assert {i for i, name in used.items() if name == "org/third"} == {0, 3, 9, 20}
    assert len(exchange.asked) == 1 + 2 * 3 - 1  # the last run has no gap
    engine.drop(running)
    remove(root, THIRD, 9)
    assert engine.run([*PROMPT, 1], ask=ASK).meta["mapped"] == 9 * 64


def test_own_blocks_first_then_the_sources(root: Path) -> None:
    own = Engine(LARGE, root, slots=4096)
    own.run(PROMPT[: 12 * 64 + 5])
    engine, exchange = target(root)
    meta = engine.run(PROMPT, ask=ASK).meta
    assert (meta["exact"], meta["mapped"]) == (12 * 64, 18 * 64)
    assert exchange.asked == [8, 16, 8, 10]


@pytest.mark.parametrize(("max_hops", "mapped"), [(1, 0), (2, 2 * 64)])
def test_lossy_blocks_of_a_source(tmp_path: Path, max_hops: int, mapped: int) -> None:
    """What lies on one mapper already is used with two hops, and named as the reason with one."""
    root = tmp_path / "exchange"
    Engine(LARGE, root).run(PROMPT[:200])
    small = Engine(SMALL, root, (DOWN,))
    assert small.run(PROMPT[:200], ask=ASK).meta["mapped"] == 192
    for index in range(3):
        remove(root, LARGE, index)  # only the small model's mapped rows are left
    lossy = chain_keys(Namespace(SMALL.digest, "lossy"), PROMPT[:200])
    [path] = root.rglob(f"{lossy[2].hex()}.kv")
    path.unlink()
    engine, exchange = target(root, max_hops=max_hops, lineage_mappers=[DOWN.manifest.digest])
    meta = engine.run(PROMPT[:200], ask=ASK).meta
    assert meta["mapped"] == mapped and meta["hops"] == (2 if mapped else 0)
    assert meta["reason"] == ("mapped" if mapped else "hops")
    # own, exact of the source, lossy of the source: one header where none can be used
    assert exchange.asked == [3, 3, 1 if max_hops == 1 else 3]


def test_too_little_to_gain(root: Path) -> None:
    engine, exchange = target(root)
    assert engine.run(PROMPT[:60], ask=ASK).meta["reason"] == "short"
    engine.run(PROMPT[:300])
    covered = engine.run(PROMPT[:340], ask=ASK).meta
    assert (covered["reason"], covered["exact"]) == ("exact", 300) and not exchange.asked


def test_runs_cover_everything_once() -> None:
    for first, stop in ((0, 0), (3, 3), (5, 4), (0, 1), (2, 300)):
        covered = list(runs(first, stop))
        assert [i for run in covered for i in run] == list(range(first, stop))
    assert max(len(run) for run in runs(0, 1000)) == 64


def test_publishing_asks_once(tmp_path: Path) -> None:
    exchange = Counting(tmp_path / "exchange")
    engine = Engine(SMALL, tmp_path / "exchange", exchange=exchange, slots=4096)
    engine.run(PROMPT)
    assert exchange.asked == [BLOCKS] and exchange.calls["put"] == BLOCKS
    exchange.asked.clear()
    engine.run([*PROMPT, *range(70)])
    assert exchange.asked == [BLOCKS + 1] and exchange.calls["put"] == BLOCKS + 1


def test_a_better_block_replaces_a_worse_one_when_published(tmp_path: Path) -> None:
    """What the batch of headers says is as good as asking for each."""
    root = tmp_path / "exchange"
    Engine(SMALL, root).run(PROMPT[:200])
    two = Engine(LARGE, root, (UP,))
    two.run(PROMPT[:200], ask=ASK)
    keys = chain_keys(Namespace(LARGE.digest, "lossy"), PROMPT[:200])
    store = two.serving.exchange
    block = store.get(keys[1], model=LARGE.digest, layout=two.serving.layout)
    worse = Lineage(hops=2, mappers=sorted([UP.manifest.digest, DOWN.manifest.digest]))
    [path] = root.rglob(f"{keys[1].hex()}.kv")
    path.unlink()
    store.put(
        keys[1],
        model=LARGE.digest,
        position=64,
        layout=block.header.layout,
        lineage=worse,
        payload=block.payload,
    )
    again = Engine(LARGE, root, (UP,))
    again.run(PROMPT[:200], ask=ASK)
    headers = again.serving.exchange.headers(keys)
    assert [h.lineage.hops for h in headers if h is not None] == [1, 1, 1]
