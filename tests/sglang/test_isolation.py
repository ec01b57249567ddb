"""No tenant ever meets another's rows, and no exact request a lossy one: on the device and in the exchange.

The matrix: who left rows (tenant, exact or mapped) x who asks (tenant, forged names) x how it asks x
which server, on SGLang's real tree and pool. Rows are functions of (model, token, position), so a
request that met foreign rows shows in what it reuses, and a mapped one also in its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pools import LARGE, SMALL, Engine, Running, mapper_between, native_rows

from kvhub.exchange import Namespace, chain_keys
from kvhub_sglang.namespace import policy_digest

UP, DOWN = mapper_between(SMALL, LARGE), mapper_between(LARGE, SMALL)
BLOCKS = 3
LENGTH = BLOCKS * 64 + 8

Tenant = tuple[str | None, str | None]
TENANTS: list[Tenant] = [
    (None, None),
    ("a", None),
    ("b", None),
    (None, "a"),  # the same word as a salt and as a key
    ("a", "b"),
    ("ab", None),
    ("1:a", None),  # what a length-prefixed name of "a" might look like
    ("client:a", None),
]
ASKS: dict[str, dict[str, Any] | None] = {
    "silent": None,
    "declined": {"reuse": False},
    "allowed": {"reuse": True},
    "from that source": {"reuse": True, "sources": ["org/small", "org/large"], "max_hops": 1},
    "two hops": {"reuse": True, "max_hops": 2},
}
_prompts = itertools.count()


def prompt() -> list[int]:
    """Tokens that nobody has used before, from the first on."""
    number = next(_prompts)
    return [(i * 37 + 11 * number + 5) % 991 + 1 for i in range(LENGTH)]


@pytest.fixture(params=[1, 16])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Engine]:
    """Both servers, each mapping from the other, on one exchange."""
    root = tmp_path / "exchange"
    common: dict[str, Any] = {"page_size": request.param, "max_hops": 2, "slots": 8192}
    return {
        "small": Engine(SMALL, root, (DOWN,), lineage_mappers=[UP.manifest.digest], **common),
        "large": Engine(LARGE, root, (UP,), lineage_mappers=[DOWN.manifest.digest], **common),
    }


def run(engine: Engine, tokens: list[int], tenant: Tenant, ask: dict[str, Any] | None) -> Running:
    """A whole request of a tenant; what it computed or reused is checked while it holds its rows."""
    req = engine.request(tokens, ask=ask, salt=tenant[0])
    req.extra_key = tenant[1]
    running = engine.admit(req)
    if running.meta["mapped"] == 0:
        torch.testing.assert_close(
            engine.row(running, len(tokens)), native_rows(engine.model, tokens, range(len(tokens)))
        )
    engine.decode(running, 2)
    engine.finish(running)
    return running


def fill(world: dict[str, Engine], tokens: list[int], tenant: Tenant) -> None:
    """The tenant leaves exact and lossy rows of both models, on the devices and in the exchange."""
    run(world["small"], tokens[:70], tenant, None)
    mapped = run(world["large"], tokens, tenant, {"reuse": True})
    assert mapped.meta["mapped"] > 0
    back = run(world["small"], [*tokens, 7], tenant, {"reuse": True})
    assert back.meta["mapped"] > 0


def assert_nothing_met(running: Running) -> None:
    assert (running.device, running.promised, running.loaded) == (0, 0, 0)
    assert running.meta["exact"] == running.meta["mapped"] == 0


@pytest.mark.parametrize("server", ["small", "large"])
def test_no_tenant_meets_another(world: dict[str, Engine], server: str) -> None:
    """Every pair of tenants, the ways to ask in turn."""
    asks = itertools.cycle(ASKS.values())
    for owner, other in itertools.permutations(TENANTS, 2):
        tokens = prompt()
        fill(world, tokens, owner)
        assert_nothing_met(run(world[server], tokens, other, next(asks)))
        own = run(world[server], [*tokens, 9], owner, ASKS["two hops"])
        assert own.meta["exact"] + own.meta["mapped"] > 64  # the owner's are still there


@pytest.mark.parametrize("server", ["small", "large"])
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("world", [16], indirect=True)
def test_every_way_to_ask(world: dict[str, Engine], server: str, ask: str) -> None:
    """Each way with each of a few pairs, after the rows of all are only in the exchange as well."""
    for owner, other in itertools.permutations(TENANTS[:3], 2):
        for emptied in (False, True):
            tokens = prompt()
            fill(world, tokens, owner)
            if emptied:
                world["small"].empty()
                world["large"].empty()
            assert_nothing_met(run(world[server], tokens, other, ASKS[ask]))


@pytest.mark.parametrize("ask", ["silent", "declined"])
@pytest.mark.parametrize("place", ["device", "exchange", "both"])
def test_an_exact_request_never_meets_lossy_rows_of_its_own_tenant(
    world: dict[str, Engine], ask: str, place: str
) -> None:
    large = world["large"]
    for tenant in TENANTS:
        tokens = prompt()
        run(world["small"], tokens, tenant, None)
        mapped = run(large, tokens, tenant, {"reuse": True})
        assert mapped.meta["mapped"] == BLOCKS * 64
        if place == "exchange":
            large.empty()
        if place == "device":
            remove_blocks(large, tokens, tenant)
        found = run(large, mapped.tokens + [3] * 70, tenant, ASKS[ask])
        assert_nothing_met(found)


def remove_blocks(engine: Engine, tokens: list[int], tenant: Tenant) -> None:
    for kind in ("exact", "lossy"):
        for model in (SMALL, LARGE):
            namespace = Namespace(model.digest, kind, (tenant[0] or "", tenant[1] or ""))  # type: ignore[arg-type]
            for key in chain_keys(namespace, tokens):
                engine.serving.exchange._path(key).unlink(missing_ok=True)  # type: ignore[attr-defined]


FORGERIES: dict[str, Callable[[Engine, str | None], str]] = {
    "the very name": lambda engine, salt: engine.serving.salts.lossy(policy(1), salt),
    "the name with two hops": lambda engine, salt: engine.serving.salts.lossy(policy(2), salt),
    "the prefix alone": lambda engine, salt: "kvhub:",
    "zeros for the nonce": lambda engine, salt: f"kvhub:{'0' * 32}:{policy(1)}:0:",
    "the nonce alone": lambda engine, salt: engine.serving.salts.lossy(policy(1), salt)[:38],
    "a longer name": lambda engine, salt: engine.serving.salts.lossy(policy(1), salt) + "x",
    "where forgeries go": lambda engine, salt: engine.serving.salts.harmless(
        engine.serving.salts.lossy(policy(1), salt)
    ),
}


def policy(hops: int) -> str:
    return policy_digest([UP.manifest.digest, DOWN.manifest.digest], hops)


@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.parametrize("field", ["cache_salt", "extra_key"])
def test_forged_names_open_nothing(world: dict[str, Engine], name: str, field: str) -> None:
    """Even one who knows the nonce, which never leaves the process, meets nothing."""
    for owner in TENANTS[:2]:
        for ask in (ASKS["silent"], ASKS["two hops"]):
            tokens = prompt()
            fill(world, tokens, owner)
            assert world["large"].serving.salts.lossy(policy(2), owner[0]) != owner[0]
            forged = FORGERIES[name](world["large"], owner[0])
            tenant: Tenant = (forged, owner[1]) if field == "cache_salt" else (owner[0], forged)
            assert_nothing_met(run(world["large"], tokens, tenant, ask))


def test_the_forged_name_is_the_real_one(world: dict[str, Engine]) -> None:
    """So that the test above means something: this is where the lossy rows are."""
    large, tokens = world["large"], prompt()
    run(world["small"], tokens, ("a", None), None)
    req = large.request(tokens, ask={"reuse": True}, salt="a")
    running = large.admit(req)
    assert req.cache_salt == FORGERIES["the name with two hops"](large, "a")
    large.drop(running)


def test_reuse_switched_off_meets_nothing(tmp_path: Path) -> None:
    """A server whose policy is `off`, whatever the request says, and one with no mapper."""
    root = tmp_path / "exchange"
    tokens = prompt()
    Engine(SMALL, root).run(tokens, 2)
    for engine in (Engine(LARGE, root, (UP,), reuse="off"), Engine(LARGE, root)):
        for ask in ASKS.values():
            running = run(engine, tokens, (None, None), ask)
            assert running.meta["mapped"] == 0
            engine.empty()
