"""Servers that restart, or whose weights change: what a new process may meet of an old one, and what not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from support.pools import LARGE, SMALL, Engine, Running, identity, mapped_rows, mapper_between, native_rows

from kvhub_sglang import hooks
from kvhub_sglang.backend import stay_off
from kvhub_sglang.metrics import Metrics

UP, DOWN = mapper_between(SMALL, LARGE), mapper_between(LARGE, SMALL)
PROMPT = [(i * 37 + 11) % 997 for i in range(200)]
ASK = {"reuse": True}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "exchange"


def holds(engine: Engine, running: Running, mapped: int) -> None:
    """The first `mapped` rows are mapped, the others the large model's own; then the request ends."""
    assert running.meta["mapped"] == mapped and running.meta["exact"] == 0
    rows = native_rows(LARGE, PROMPT, range(200))
    if mapped:
        rows[:, :, :mapped] = mapped_rows(
            UP, native_rows(SMALL, PROMPT[:mapped], range(mapped)), range(mapped)
        )
    torch.testing.assert_close(engine.row(running, 200), rows)
    engine.decode(running, 2)
    engine.finish(running)
    engine.empty()


def test_a_source_that_restarts_leaves_what_it_had_left(root: Path) -> None:
    Engine(SMALL, root).run(PROMPT[:130], 4)
    Engine(SMALL, root).run(PROMPT, 4)  # finds two blocks, adds one
    target = Engine(LARGE, root, (UP,))
    holds(target, target.admit(target.request(PROMPT, ask=ASK)), 192)


def test_a_source_that_restarts_with_other_weights_is_another_model(root: Path) -> None:
    tuned = identity("org/small", 3, 1).model_copy(update={"revision": "fingerprint:" + "e" * 64})
    Engine(tuned, root).run(PROMPT, 4)
    target = Engine(LARGE, root, (UP,))
    running = target.admit(target.request(PROMPT, ask=ASK))
    assert running.meta["reason"] == "no_source"
    holds(target, running, 0)


def test_a_target_that_restarts_maps_again(root: Path) -> None:
    """Its own lossy rows, which the old process left in the exchange, are never taken for its own."""
    Engine(SMALL, root).run(PROMPT, 4)
    before = Engine(LARGE, root, (UP,))
    before.run(PROMPT, 70, ask=ASK)
    after = Engine(LARGE, root, (UP,))
    assert before.serving.salts.nonce != after.serving.salts.nonce
    plain = after.admit(after.request(PROMPT))
    assert plain.device == plain.promised == 0
    after.drop(plain)
    holds(after, after.admit(after.request(PROMPT, ask=ASK)), 192)


def test_what_an_old_process_mapped_counts_its_hops_in_a_new_one(root: Path) -> None:
    common = {"max_hops": 2}
    Engine(SMALL, root).run([*PROMPT[:64], 1], 1)
    Engine(LARGE, root, (UP,), lineage_mappers=[DOWN.manifest.digest], **common).run(PROMPT, 2, ask=ASK)
    small = Engine(SMALL, root, (DOWN,), lineage_mappers=[UP.manifest.digest], **common)
    assert small.run([*PROMPT, 7], 2, ask=ASK).meta["hops"] == 2
    one = Engine(SMALL, root, (DOWN,), lineage_mappers=[UP.manifest.digest])
    assert one.run([*PROMPT, 7], 2, ask=ASK).meta["mapped"] == 0


# ---- weights updated online


@pytest.fixture(scope="module")
def hooked() -> Iterator[None]:
    """kvhub's hooks on SGLang's own class, as its plugin places them; taken away again."""
    names = {target: target.rpartition(".")[2] for target in hooks.WEIGHT_UPDATES}
    originals = {name: SchedulerWeightUpdaterManager.__dict__[name] for name in names.values()}
    for target in names:
        HookRegistry.register(target, hooks._weights_changed, HookType.BEFORE)
    HookRegistry.apply_hooks()
    try:
        assert not set(hooks.WEIGHT_UPDATES) & set(hooks.missing())
        yield
    finally:
        for target, name in names.items():
            setattr(SchedulerWeightUpdaterManager, name, originals[name])
            HookRegistry._hooks.pop(target)
            HookRegistry._patched.discard(target)


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("update", [target.rpartition(".")[2] for target in hooks.WEIGHT_UPDATES])
def test_weights_that_are_updated_switch_kvhub_off(
    root: Path, hooked: None, side: str, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = Engine(SMALL, root), Engine(LARGE, root, (UP,))
    counted: list[str] = []
    monkeypatch.setattr(target.serving.metrics, "request", lambda report: counted.append(str(report.reason)))
    source.run(PROMPT, 4)
    running = target.admit(target.request(PROMPT, ask=ASK))
    assert running.meta["mapped"] == 192
    changed = source if side == "source" else target
    hooks.watch_weights(changed.cache.switch_off)
    manager = object.__new__(SchedulerWeightUpdaterManager)
    with contextlib.suppress(AttributeError, TypeError):  # the update itself cannot work here
        getattr(manager, update)(None)
    assert changed.cache.serving is None and "weights" in changed.cache.off_because
    target.decode(running, 2)
    target.finish(running)  # what was in flight ends in its own namespace
    blocks = len(list(root.rglob("*.kv")))
    changed.run([5, *PROMPT], 70)
    assert len(list(root.rglob("*.kv"))) == blocks  # nothing is published under the old identity
    after = target.run([5, *PROMPT], ask=ASK)
    if side == "source":
        assert after.meta["mapped"] == 0
    else:  # who asks is told, and nobody else
        assert (after.meta["reason"], after.meta["mapped"]) == ("disabled", 0)
        assert "weights were updated" in after.meta["detail"] and counted[-1] == "disabled"
        silent = target.run([6, *PROMPT])
        assert "kvhub" not in (silent.req.customized_info or {})
    source.empty()
    target.empty()


def test_a_server_that_is_off_from_the_start_says_why(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    monkeypatch.setattr(Metrics, "request", lambda self, report: counted.append(str(report.reason)))
    monkeypatch.setattr(Metrics, "off", lambda self: counted.append(f"off, enabled {self.enabled}"))
    server = Engine(LARGE, root, (UP,))
    server.cache.serving = None  # as if `open_serving` had refused
    context = SimpleNamespace(params=SimpleNamespace(enable_metrics=True))
    stay_off(server.cache, context, None, "the server has a reason")
    asked = server.run(PROMPT, ask=ASK)
    assert (asked.meta["reason"], asked.meta["detail"]) == ("disabled", "the server has a reason")
    assert "kvhub" not in (server.run([6, *PROMPT]).req.customized_info or {})
    assert counted == ["off, enabled True", "disabled"]
    server.empty()
