"""What is left in the exchange, by class, and what that saves and costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.pools import LARGE, SMALL, Engine, mapper_between

from kvhub.errors import BadInput
from kvhub.exchange import BLOCK_TOKENS
from kvhub_sglang.settings import ENVIRONMENT, load_settings

UP, DOWN = mapper_between(SMALL, LARGE), mapper_between(LARGE, SMALL)
PROMPT = [(i * 37 + 11) % 997 for i in range(200)]
ASK = {"reuse": True}
Turn = tuple[int, int, int]


def talk(root: Path, publish: str, *, max_hops: int = 1, heal: bool = False) -> list[Turn]:
    """Six turns that alternate between the models; exact, mapped and prefilled tokens of each."""
    common: dict[str, Any] = {
        "min_span": 16,
        "max_hops": max_hops,
        "publish": publish,
        "heal": heal,
        "internal": heal,
    }
    engines = [
        Engine(SMALL, root, (DOWN,), lineage_mappers=[UP.manifest.digest], **common),
        Engine(LARGE, root, (UP,), lineage_mappers=[DOWN.manifest.digest], **common),
    ]
    tokens, turns = list(PROMPT), []
    for number in range(6):
        engine = engines[number % 2]
        done = engine.run(tokens, 4, ask=ASK)
        turns.append((done.meta["exact"], done.meta["mapped"], done.meta["prefilled"]))
        tokens = [*done.tokens, *range(100 * number, 100 * number + 80)]
        while heal and engine.serve_itself(idle=True):
            pass
    for engine in engines:
        engine.empty()
    return turns


def stored(root: Path) -> dict[str, int]:
    """Bytes of payload by class."""
    found = {"exact": 0, "lossy": 0}
    from kvhub.exchange import DirectoryExchange

    exchange = DirectoryExchange(root)
    for path in root.rglob("*.kv"):
        header = exchange.header(bytes.fromhex(path.stem))
        assert header is not None
        found["exact" if header.lineage.exact else "lossy"] += header.layout.nbytes
    return found


def test_with_one_hop_lossy_blocks_only_cost_room(tmp_path: Path) -> None:
    turns = {mode: talk(tmp_path / mode, mode) for mode in ("all", "exact")}
    assert turns["all"] == turns["exact"] and any(mapped for _, mapped, _ in turns["all"])
    held = {mode: stored(tmp_path / mode) for mode in ("all", "exact")}
    assert held["exact"] == {"exact": held["all"]["exact"], "lossy": 0}
    # more than half of what six turns leave there is of no use to anybody
    saved = held["all"]["lossy"] / sum(held["all"].values())
    assert 0.5 < saved < 0.7, saved


def test_with_two_hops_they_are_what_is_mapped(tmp_path: Path) -> None:
    turns = {mode: talk(tmp_path / mode, mode, max_hops=2) for mode in ("all", "exact")}
    assert sum(t[1] for t in turns["all"]) > sum(t[1] for t in turns["exact"])
    assert stored(tmp_path / "all")["lossy"] > 0 == stored(tmp_path / "exact")["lossy"]


def test_healed_blocks_are_published(tmp_path: Path) -> None:
    turns = talk(tmp_path / "x", "exact", heal=True)
    # nothing is computed but what is new, and what is no whole block or too little to gain
    assert all(prefilled < 84 + BLOCK_TOKENS for _, _, prefilled in turns[1:])
    assert all(mapped > 0 for _, mapped, _ in turns[1:]) and stored(tmp_path / "x")["lossy"] == 0


def test_none_leaves_nothing(tmp_path: Path) -> None:
    talk(tmp_path / "x", "none")
    assert stored(tmp_path / "x") == {"exact": 0, "lossy": 0}


@pytest.mark.parametrize(
    ("value", "read"), [(True, "all"), (False, "none"), ("exact", "exact"), ("some", None), (1, None)]
)
def test_what_a_settings_file_may_say(tmp_path: Path, value: object, read: str | None) -> None:
    file = tmp_path / "serving.json"
    file.write_text(json.dumps({"exchange": "/x", "publish": value}))
    if read is None:
        with pytest.raises(BadInput, match="publish"):
            load_settings({ENVIRONMENT: str(file)})
    else:
        assert load_settings({ENVIRONMENT: str(file)}).publish == read
