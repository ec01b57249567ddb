"""draft, ready, retired; names that move; what the gate has to say."""

from __future__ import annotations

import pytest
from support.published import make_evidence
from support.stored import stored

from kvhub.catalog import find, look_up, record_evidence
from kvhub.errors import BadInput, Corrupt, Incompatible, NotFound
from kvhub.settings import Settings
from kvhub.store.lifecycle import name, promote, retire, unname
from kvhub_registry import State


def test_a_life(home: Settings) -> None:
    digest = stored(home).digest
    assert find(digest).state is State.READY
    assert retire(digest, why="a better one is there").state_reason == "a better one is there"
    row = promote(digest, why="it was not")
    assert (row.state, row.state_reason) == (State.READY, "it was not")
    assert [(event.what, event.why) for event in look_up(digest)[1]] == [
        ("draft", "registered"),
        ("ready", "evaluated"),
        ("retired", "a better one is there"),
        ("ready", "it was not"),
    ]
    assert row.changed == look_up(digest)[1][-1].at or row.changed <= look_up(digest)[1][-1].at


def test_only_promote_brings_a_retired_mapper_back(home: Settings) -> None:
    manifest = stored(home)
    retire(manifest.digest, why="no")
    assert record_evidence(manifest, make_evidence(manifest), why="again") is State.RETIRED
    assert find(manifest.digest).state is State.RETIRED


def test_there_is_no_way_around_the_gate(home: Settings) -> None:
    for seed, top1, code in ((1, None, "unevaluated"), (2, 0.5, "gate")):
        digest = stored(home, seed, top1=top1).digest
        with pytest.raises(Incompatible) as caught:
            promote(digest, why="please")
        assert caught.value.code == code
        assert find(digest).state is State.DRAFT


def test_damage_is_not_promoted(home: Settings) -> None:
    digest = stored(home).digest
    weights = home.mappers / digest / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(Corrupt):
        promote(digest, why="please")
    assert find(digest).state is State.DRAFT


def test_names_move(home: Settings) -> None:
    one, two = stored(home, 1).digest, stored(home, 2).digest
    assert name("@prod", one, why="first")[1] is None
    assert find("@prod").digest == find("prod").digest == one
    assert name("prod", two, why="better")[1] == one
    assert find("@prod").digest == two
    assert [event.what for event in look_up(one)[1]][-1] == "alias prod moved away"
    assert name("also", "@prod", why="")[0].digest == two
    assert unname("@prod", why="") == two
    with pytest.raises(NotFound):
        find("@prod")
    for wrong in ("", "@", "org/name", "a b", "9x", "facade", "x->y", "a" * 65, "\x1b[31m"):
        with pytest.raises(BadInput):
            name(wrong, one, why="")
