"""Requests of the server to itself: exact prefixes, native tails, healing, shadows, timed prefills."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from support.pools import LARGE, SMALL, Engine, mapped_rows, mapper_between, native_rows

from kvhub_sglang.shadow import LEAST, Shadow, divergence, upper_bound

MAPPER = mapper_between(SMALL, LARGE)
CAREFUL = mapper_between(SMALL, LARGE, exact_prefix=4)
PROMPT = [(i * 37 + 11) % 997 for i in range(200)]
ASK = {"reuse": True}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    Engine(SMALL, tmp_path / "exchange").run(PROMPT, 4)
    return tmp_path / "exchange"


def large(root: Path, mapper: Any = MAPPER, **settings: Any) -> Engine:
    return Engine(LARGE, root, (mapper,), internal=True, **settings)


def native(tokens: list[int], start: int, stop: int) -> torch.Tensor:
    return native_rows(LARGE, tokens[start:stop], range(start, stop))


def mapped(tokens: list[int], start: int, stop: int, mapper: Any = MAPPER) -> torch.Tensor:
    return mapped_rows(mapper, native_rows(SMALL, tokens[start:stop], range(start, stop)), range(start, stop))


# ---- the first tokens are computed, the rest is mapped


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_the_exact_prefix_is_computed_first(root: Path, page_size: int) -> None:
    target = large(root, CAREFUL, page_size=page_size)
    running = target.admit(target.request([*PROMPT, 5], ask=ASK))
    first = -(-4 // page_size) * page_size
    assert (running.meta["exact"], running.meta["mapped"]) == (first, 192 - first)
    assert running.meta["reason"] == "mapped"
    parts = [native(PROMPT, 0, first), mapped(PROMPT, first, 192, CAREFUL), native([*PROMPT, 5], 192, 201)]
    torch.testing.assert_close(target.row(running, 201), torch.cat(parts, dim=2))
    target.decode(running, 1)
    target.finish(running)
    target.empty()


def test_a_server_may_ask_for_more_than_the_mapper_does(root: Path) -> None:
    target = large(root)
    [candidate] = target.serving.candidates
    target.serving.candidates = (type(candidate)(MAPPER, candidate.digest, SMALL, True, 10, 40),)
    running = target.admit(target.request([*PROMPT, 5], ask=ASK))
    # ten computed first; of what could be mapped, 40 tokens are held back
    assert (running.meta["exact"], running.meta["mapped"], running.meta["prefilled"]) == (10, 142, 49)
    parts = [native(PROMPT, 0, 10), mapped(PROMPT, 10, 152), native([*PROMPT, 5], 152, 201)]
    torch.testing.assert_close(target.row(running, 201), torch.cat(parts, dim=2))
    target.decode(running, 1)
    target.finish(running)
    target.empty()


def test_a_prefix_that_does_not_come_is_not_waited_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = large(root, CAREFUL, stage_wait_ms=1000)
    monkeypatch.setattr(target, "serve_itself", lambda **_: 0)
    running = target.admit(target.request(PROMPT, ask=ASK))
    assert running.meta["mapped"] == 0 and running.meta["reason"] == "exact_prefix"
    assert target.serving.stager.budget.held == 0
    torch.testing.assert_close(target.row(running, 200), native(PROMPT, 0, 200))
    target.decode(running, 1)
    target.finish(running)
    target.empty()


def test_an_aborted_prefix_ends_the_wait(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = large(root, CAREFUL, stage_wait_ms=60000)
    internal = target.serving.internal
    assert internal is not None
    aborted: list[str] = []

    def abort(**_: Any) -> int:
        for wanted in target.cache.take_internal(lambda: False):
            internal.finished(wanted.rid, None)
            aborted.append(wanted.kind)
        return 0

    monkeypatch.setattr(target, "serve_itself", abort)
    running = target.admit(target.request(PROMPT, ask=ASK))
    assert aborted == ["prefix"] and running.meta["reason"] == "exact_prefix"
    target.drop(running)
    target.empty()


def test_internal_requests_stay_in_their_tenant(root: Path) -> None:
    Engine(SMALL, root).run(PROMPT, 4, salt="a")
    target = large(root, CAREFUL)
    assert target.run(PROMPT, ask=ASK, salt="a").meta["mapped"] > 0
    other = target.admit(target.request(PROMPT, salt="b"))
    assert other.device == 0
    target.drop(other)
    target.empty()


# ---- healing


@pytest.mark.parametrize("page_size", [1, 16])
def test_idle_servers_heal(root: Path, page_size: int) -> None:
    target = large(root, page_size=page_size, heal=True, heal_tokens=64)
    first = target.run(PROMPT, 4, ask=ASK)
    assert first.meta["mapped"] == 192
    steps = 0
    while target.serve_itself(idle=True):
        steps += 1
        target.check()
    whole = len(first.tokens) - 1
    assert steps == -(-(whole - whole % page_size) // 64)
    again = target.admit(target.request([*first.tokens, 7], ask=ASK))
    assert again.meta["mapped"] == 0 and again.meta["exact"] == whole - whole % page_size
    torch.testing.assert_close(target.row(again, 205), native([*first.tokens, 7], 0, 205))
    target.decode(again, 1)
    target.finish(again)
    target.empty()


@pytest.mark.parametrize("page_size", [1, 16])
def test_healed_rows_win_where_more_is_mapped_on_them(root: Path, page_size: int) -> None:
    """The next switch needs the lossy namespace again: its old rows there give way to the exact ones."""
    source = Engine(SMALL, root, page_size=page_size)
    target = large(root, page_size=page_size, heal=True)
    first = target.run(PROMPT, 4, ask=ASK)
    still_running = target.admit(target.request([*first.tokens, 3], ask=ASK))  # shares the lossy rows
    assert still_running.meta["mapped"] > 0 == still_running.meta["exact"]
    while target.serve_itself(idle=True):
        pass
    longer = [*first.tokens, *[(i * 31) % 900 for i in range(150)]]
    source.run(longer, 1)
    again = target.admit(target.request([*longer, 7], ask=ASK))
    own = 203 - 203 % page_size
    reach = len(longer) // 64 * 64
    assert (again.meta["exact"], again.meta["mapped"], again.meta["hops"]) == (own, reach - own, 1)
    parts = [
        native(longer, 0, own),
        mapped(longer, own, reach),
        native([*longer, 7], reach, len(longer) + 1),
    ]
    torch.testing.assert_close(target.row(again, len(longer) + 1), torch.cat(parts, dim=2))
    target.decode(again, 1)
    target.finish(again)
    target.decode(still_running, 3)
    target.finish(still_running)
    plain = target.admit(target.request([*longer, 7]))
    assert (plain.device, plain.promised) == (own, 0)  # nothing lossy came the other way
    torch.testing.assert_close(target.row(plain, len(longer)), native(longer, 0, len(longer)))
    target.drop(plain)
    target.empty()


def test_conversations_that_begin_alike_are_all_healed(root: Path) -> None:
    """One system prompt before all of them; of one conversation only its last turn is kept."""
    target = large(root, heal=True)
    source = Engine(SMALL, root)
    talks = [[*PROMPT[:100], *[n * 100 + i for i in range(100)]] for n in range(3)]
    for tokens in talks:
        source.run(tokens, 1)
        done = target.run(tokens, 4, ask=ASK)
        assert done.meta["mapped"] > 0
        target.run([*done.tokens, 5], 4, ask=ASK)
    assert target.cache.background is not None
    assert [len(span.tokens) for span in target.cache.background.healer._spans] == [208] * 3
    while target.serve_itself(idle=True):
        pass
    for tokens in talks:
        plain = target.admit(target.request([*tokens, 1]))
        assert plain.device == 200
        target.drop(plain)
    target.empty()


def test_healing_stops_where_it_would_evict(root: Path) -> None:
    target = large(root, heal=True, heal_tokens=64, slots=430)
    target.run(PROMPT, 4, ask=ASK)
    target.run([3] * 180)
    assert target.serve_itself(idle=True) == 0 and target.serve_itself(idle=True) == 0


def test_nothing_is_done_unless_asked_for_or_while_busy(root: Path) -> None:
    off = large(root)
    off.run(PROMPT, 4, ask=ASK)
    assert off.serve_itself(idle=True) == 0
    on = large(root, heal=True)
    on.run(PROMPT, 4, ask=ASK)
    assert on.serve_itself(idle=False) == 0
    assert on.serve_itself(idle=True) == 1


# ---- shadows


def test_a_shadow_compares_mapped_with_native(root: Path) -> None:
    target = large(root, shadow=1.0)
    assert target.cache.background is not None
    seen: list[tuple[str, dict[int, float], dict[int, float]]] = []
    target.cache.background.shadow.compared = lambda *found: seen.append(found)  # type: ignore[method-assign]
    target.run(PROMPT, 4, ask=ASK)
    while target.serve_itself(idle=True):
        pass
    [(mapper, found, lossy)] = seen
    assert mapper == MAPPER.manifest.digest

    def expected(rows: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(rows[-1, 0].sum(0).flatten(), 0)

    for table, rows in (
        (found, native(PROMPT, 0, 200)),
        (lossy, torch.cat([mapped(PROMPT, 0, 192), native(PROMPT, 192, 200)], dim=2)),
    ):
        reference = expected(rows)
        assert table == pytest.approx({i: float(v) for i, v in enumerate(reference)}, abs=1e-4)
    target.empty()


def test_a_shadow_leaves_no_lossy_row_in_the_exact_namespace(root: Path) -> None:
    target = large(root, shadow=1.0)
    target.run(PROMPT, 4, ask=ASK)
    while target.serve_itself(idle=True):
        pass
    plain = target.admit(target.request(PROMPT))
    assert plain.meta["mapped"] == 0
    torch.testing.assert_close(target.row(plain, 200), native(PROMPT, 0, 200))
    target.drop(plain)
    target.empty()


def test_rows_that_are_gone_are_not_compared(root: Path) -> None:
    target = large(root, shadow=1.0)
    assert target.cache.background is not None
    seen: list[Any] = []
    target.cache.background.shadow.compared = lambda *found: seen.append(found)  # type: ignore[method-assign]
    target.run(PROMPT, 4, ask=ASK)
    target.cache.evict(EvictParams(num_tokens=10**6))
    while target.serve_itself(idle=True):
        pass
    assert not seen
    target.empty()


@pytest.mark.parametrize("draft", [True, False])
def test_a_mapper_that_leaves_its_gate_is_withdrawn(root: Path, draft: bool) -> None:
    target = large(root, shadow=1.0, draft=draft)
    assert target.cache.background is not None
    shadow = target.cache.background.shadow
    for number in range(LEAST):
        assert target.serving.candidates
        shadow.compared(MAPPER.manifest.digest, {1: -0.1, 2: -3.0}, {1: -0.1 - 2 * (number % 2), 2: -1.0})
    found = target.run(PROMPT, ask=ASK).meta
    # a draft never was in the gate: who serves it knows that
    assert (found["mapped"] == 192) == draft and bool(target.serving.candidates) == draft
    target.empty()


def test_the_sample_is_a_share_of_the_prompts() -> None:
    shadow = Shadow(None, 0.25, lambda digest: None)  # type: ignore[arg-type]
    taken = [shadow.sampled([n, n + 1, 7]) for n in range(2000)]
    assert 400 < sum(taken) < 600 and taken == [shadow.sampled([n, n + 1, 7]) for n in range(2000)]


def test_divergence_is_the_textbooks() -> None:
    p, q = torch.randn(30).log_softmax(0), torch.randn(30).log_softmax(0)
    exact = float((p.exp() * (p - q)).sum())
    every = {i: float(v) for i, v in enumerate(p)}
    assert divergence(every, {i: float(v) for i, v in enumerate(q)}) == pytest.approx(exact, abs=1e-5)
    assert divergence(every, every) == 0
    half, quarter = {1: math.log(0.5)}, {1: math.log(0.25)}
    assert divergence(half, quarter) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))


@pytest.mark.parametrize(("agreed", "n", "bound"), [(0, 32, 0.107), (16, 32, 0.664), (32, 32, 1.0)])
def test_the_bound(agreed: int, n: int, bound: float) -> None:
    assert upper_bound(agreed, n) == pytest.approx(bound, abs=2e-3)


# ---- the cost of a prefill, and the decision that needs it


def test_a_server_times_itself_before_it_maps(root: Path) -> None:
    target = large(root, worth="auto")
    first = target.run(PROMPT, ask=ASK)
    assert first.meta["mapped"] == 0 and first.meta["reason"] == "not_worth_it"
    rounds = 0
    while target.serve_itself(idle=True):
        rounds += 1
    assert rounds == 5
    plain = target.admit(target.request(PROMPT[:64]))
    assert plain.device == 64 - 1  # of the prompt before; nothing of the timing is in the tree
    target.drop(plain)


@pytest.mark.parametrize(("per_token", "worth"), [(0.01, True), (5.0, False)])
def test_mapping_is_used_where_it_is_faster(root: Path, per_token: float, worth: bool) -> None:
    target = large(root, worth="auto")
    for tokens in (64, 128, 256, 512):
        target.serving.cost.observe_prefill(tokens, 0, 2 + 1.0 * tokens)
        target.serving.cost.observe_map(MAPPER.manifest.digest, tokens, 1 + per_token * tokens)
    running = target.run(PROMPT, ask=ASK)
    assert (running.meta["mapped"] == 192) == worth
    assert running.meta["reason"] == ("mapped" if worth else "not_worth_it")
    reuse, compute = running.meta["predicted_ms"]
    assert (reuse < compute) == worth
    # what is on the device costs nothing, whatever mapping costs
    if worth:
        target.serving.cost.observe_map(MAPPER.manifest.digest, 64, 10**6)
        assert target.run([*PROMPT, 1], ask=ASK).meta["mapped"] == 200
    target.empty()


@pytest.mark.parametrize(
    ("server", "hint", "client", "mapped"),
    [
        ("auto", None, "always", False),
        ("always", None, "auto", False),
        ("always", None, None, True),
        ("auto", "always", None, True),
        ("auto", "always", "auto", False),
    ],
)
def test_a_client_may_only_narrow(
    root: Path, server: str, hint: str | None, client: str | None, mapped: bool
) -> None:
    from sglang.srt.managers.io_struct import KvHintsEnvelope

    target = large(root, worth=server)
    req = target.request(PROMPT, ask={**ASK, **({"worth": client} if client else {})})
    if hint:
        action = {
            "action_id": "1",
            "action_type": "kvhub.reuse",
            "action_version": "1",
            "payload": {"reuse": True, "worth": hint},
        }
        import msgspec

        req.kv_hints = msgspec.convert(
            {"protocol_version": "1", "message_id": "m", "actions": [action]}, KvHintsEnvelope
        )
    running = target.admit(req)
    assert (running.meta["mapped"] > 0) == mapped
    target.drop(running)
