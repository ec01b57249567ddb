"""Replicas of one model on one exchange: what one computed is exact for the others, no more is shared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.pools import LARGE, SMALL, Engine, mapper_between, native_rows

from kvhub.exchange import DirectoryExchange

UP = mapper_between(SMALL, LARGE)
PROMPT = [(i * 37 + 11) % 997 for i in range(200)]
ASK = {"reuse": True}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "exchange"


def replicas(root: Path, count: int = 2, **settings: object) -> list[Engine]:
    return [Engine(LARGE, root, (UP,), **settings) for _ in range(count)]  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [1, 64])
def test_a_conversation_goes_round_the_replicas(root: Path, page_size: int) -> None:
    """Each turn on another one: the history is read, exact to the row, never mapped."""
    group = replicas(root, 3, page_size=page_size)
    tokens = list(PROMPT)
    for turn in range(6):
        engine = group[turn % 3]
        running = engine.admit(engine.request(tokens, ask=ASK))
        assert running.meta["mapped"] == 0
        if turn:  # all full blocks of the turn before; its last token has no row
            assert (
                running.meta["exact"] >= (len(tokens) - 81) // 64 * 64 and running.meta["reason"] == "exact"
            )
        torch.testing.assert_close(
            engine.row(running, len(tokens)), native_rows(LARGE, tokens, range(len(tokens)))
        )
        engine.decode(running, 5)
        engine.finish(running)
        tokens = [*running.tokens, *range(70 * turn, 70 * turn + 76)]
    for engine in group:
        engine.empty()


def test_the_same_prompt_computed_twice_is_stored_once(root: Path) -> None:
    one, two = replicas(root)
    first, second = (engine.admit(engine.request(PROMPT)) for engine in (one, two))  # neither has published
    for engine, running in ((one, first), (two, second)):
        engine.decode(running, 2)
        engine.finish(running)
    exchange = DirectoryExchange(root)
    paths = list(root.rglob("*.kv"))
    assert len(paths) == 3
    for path in paths:
        header = exchange.header(bytes.fromhex(path.stem))
        assert header is not None and header.lineage.exact
        block = exchange.get(bytes.fromhex(path.stem), model=LARGE.digest, layout=one.serving.layout)
        where = range(header.position, header.position + 64)
        rows = native_rows(LARGE, PROMPT[where.start : where.stop], where)
        torch.testing.assert_close(block.payload, rows)


def test_a_replica_reads_only_if_the_request_may_reuse(root: Path) -> None:
    """A server without mappers too: its own rows come back for those that ask."""
    one, two = Engine(LARGE, root), Engine(LARGE, root)
    one.run(PROMPT, 2)
    assert two.run(PROMPT, 2, ask={"reuse": False}).meta["exact"] == 0
    two.cache.reset()
    two.allocator.clear()
    assert two.run(PROMPT, 2, ask=ASK).meta["exact"] == 192


@pytest.mark.parametrize("salt", ["a", None])
def test_tenants_are_apart_on_every_replica(root: Path, salt: str | None) -> None:
    one, two = replicas(root)
    one.run(PROMPT, 2, salt=salt)
    for other in ("b", "a" if salt is None else None):
        assert two.run(PROMPT, 1, ask=ASK, salt=other).meta["exact"] == 0
    two.cache.reset()
    two.allocator.clear()
    assert two.run(PROMPT, 1, ask=ASK, salt=salt).meta["exact"] == 192


def test_mapped_rows_are_no_replicas_exact_rows(root: Path) -> None:
    """What one replica mapped, the other maps itself, from the source; rows computed on it stay lossy."""
    one, two = replicas(root)
    Engine(SMALL, root).run(PROMPT, 4)
    first = one.run(PROMPT, 70, ask=ASK)
    second = two.admit(two.request([*first.tokens, 9], ask=ASK))
    assert (second.meta["exact"], second.meta["mapped"]) == (0, 192) and second.meta["hops"] == 1
    two.drop(second)
    plain = two.admit(two.request([*first.tokens, 9]))
    assert plain.device == plain.promised == 0
    two.drop(plain)


def test_what_one_healed_is_exact_for_the_other(root: Path) -> None:
    one, two = replicas(root, heal=True, internal=True)
    Engine(SMALL, root).run(PROMPT, 4)
    first = one.run(PROMPT, 70, ask=ASK)
    assert first.meta["mapped"] == 192
    while one.serve_itself(idle=True):
        pass
    second = two.run([*first.tokens, 9], 2, ask=ASK)
    assert second.meta["mapped"] == 0 and second.meta["exact"] == (len(first.tokens) - 1) // 64 * 64
