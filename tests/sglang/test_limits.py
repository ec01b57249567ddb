"""Limits of one mapper beside the server's: turns, span, hops. The stricter holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.managers.io_struct import KvHintsEnvelope
from support.pools import LARGE, SMALL, Engine, Running, identity, mapper_between, native_rows

from kvhub_sglang.choice import ACTION

UP, DOWN = mapper_between(SMALL, LARGE), mapper_between(LARGE, SMALL)
THIRD = identity("org/third", 3, 1)
SIDE = mapper_between(THIRD, LARGE)
PROMPT = [(i * 37 + 11) % 997 for i in range(200)]


def limited(engine: Engine, number: int = 0, **limits: Any) -> Engine:
    """The engine with limits on one of its mappers."""
    candidates = list(engine.serving.candidates)
    candidates[number] = replace(candidates[number], **limits)
    engine.serving.candidates = tuple(candidates)
    return engine


def run(engine: Engine, tokens: list[int], *, hint: int | None = None, client: int | None = None) -> Running:
    """A request for reuse by a hint (and by its client) that says its turn, or does not."""
    ask = None if client is None else {"reuse": True, "turn": client}
    req = engine.request(tokens, ask=ask)
    payload = {"reuse": True} | ({} if hint is None else {"turn": hint})
    action = {"action_id": "1", "action_type": ACTION, "action_version": "1", "payload": payload}
    envelope = {"protocol_version": "1", "message_id": "m", "actions": [action]}
    req.kv_hints = msgspec.convert(envelope, KvHintsEnvelope)
    running = engine.admit(req)
    if running.meta["mapped"] == 0:
        rows = native_rows(engine.model, tokens, range(len(tokens)))
        torch.testing.assert_close(engine.row(running, len(tokens)), rows)
    engine.decode(running, 2)
    engine.finish(running)
    return running


@pytest.fixture
def root(tmp_path: Path) -> Path:
    Engine(SMALL, tmp_path / "exchange").run(PROMPT, 4)
    return tmp_path / "exchange"


@pytest.mark.parametrize(
    ("hint", "client", "mapped"),
    [
        (1, None, True),
        (3, None, True),
        (4, None, False),
        (None, None, False),
        (None, 1, False),  # its own word is not enough
        (2, 9, False),  # but may narrow
        (2, 1, True),
        (4, 1, False),
    ],
)
def test_later_turns_are_computed(root: Path, hint: int | None, client: int | None, mapped: bool) -> None:
    engine = limited(Engine(LARGE, root, (UP,)), max_turn=3)
    meta = run(engine, PROMPT, hint=hint, client=client).meta
    assert (meta["mapped"] > 0) == mapped and meta["reason"] == ("mapped" if mapped else "turns")
    engine.empty()


def test_a_conversation_that_passes_its_last_turn_leaves_its_mapped_rows(root: Path) -> None:
    engine = limited(Engine(LARGE, root, (UP,)), max_turn=1)
    first = run(engine, PROMPT, hint=1)
    assert first.meta["mapped"] == 192
    second = run(engine, [*first.tokens, 7], hint=2)
    assert second.meta["prefilled"] == 203 and second.device == 0
    third = run(engine, [*second.tokens, 8], hint=3)  # on what it computed
    assert third.meta["exact"] == 204 and third.meta["mapped"] == 0
    engine.empty()


def test_another_mapper_without_the_limit_is_used(root: Path) -> None:
    Engine(THIRD, root).run(PROMPT, 4)
    engine = limited(Engine(LARGE, root, (UP, SIDE)), max_turn=1)
    assert run(engine, PROMPT, hint=1).meta["source"] == "org/small"
    engine.cache.reset()
    engine.allocator.clear()
    assert run(engine, PROMPT, hint=2).meta["source"] == "org/third"


@pytest.mark.parametrize(("least", "mapped"), [(1, 192), (192, 192), (193, 0)])
def test_a_longer_span(root: Path, least: int, mapped: int) -> None:
    engine = limited(Engine(LARGE, root, (UP,)), min_span=least)
    assert run(engine, PROMPT).meta["mapped"] == mapped
    engine.empty()


@pytest.mark.parametrize(("most", "mapped"), [(8, 192), (1, 0)])
def test_fewer_hops(tmp_path: Path, most: int, mapped: int) -> None:
    root = tmp_path / "exchange"
    Engine(LARGE, root).run([*PROMPT[:192], 1])
    small = Engine(SMALL, root, (DOWN,))
    assert run(small, PROMPT).meta["mapped"] == 192
    for path in root.rglob("*.kv"):  # nothing exact is left
        header = small.serving.exchange.header(bytes.fromhex(path.stem))
        assert header is not None
        if header.lineage.exact:
            path.unlink()
    engine = Engine(LARGE, root, (UP,), max_hops=2, lineage_mappers=[DOWN.manifest.digest])
    meta = run(limited(engine, max_hops=most), PROMPT).meta
    assert meta["mapped"] == mapped and meta["reason"] == ("mapped" if mapped else "hops")
