"""Handoffs on SGLang's real tree, allocator and pool: what is reused, and that nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.pools import LARGE, SMALL, Engine, mapped_rows, mapper_between, native_rows

ASK = {"reuse": True}
MAPPER = mapper_between(SMALL, LARGE)
BACK = mapper_between(LARGE, SMALL)
PROMPT = [(i * 37 + 11) % 997 for i in range(200)]


@pytest.fixture(params=[1, 16, 64])
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "exchange"


def expected(tokens: list[int], stop: int, spans: list[tuple[int, str]]) -> torch.Tensor:
    """Rows of the large model up to `stop`, each span `(end, origin)` native or mapped."""
    parts, start = [], 0
    for end, origin in spans:
        positions = range(start, end)
        if origin == "native":
            parts.append(native_rows(LARGE, tokens[start:end], positions))
        else:
            parts.append(mapped_rows(MAPPER, native_rows(SMALL, tokens[start:end], positions), positions))
        start = end
    return torch.cat(parts, dim=2)[:, :, :stop]


def test_a_switched_conversation_reads_mapped_rows(root: Path, page_size: int) -> None:
    source, target = (
        Engine(SMALL, root, page_size=page_size),
        Engine(LARGE, root, (MAPPER,), page_size=page_size),
    )
    source.run(PROMPT, 4)
    running = target.admit(target.request([*PROMPT, 5, 6, 7], ask=ASK))
    assert (running.device, running.promised, running.loaded) == (0, 192, 192)
    assert running.meta == {
        **running.meta,
        "exact": 0, "mapped": 192, "prefilled": 11, "reason": "mapped", "source": "org/small", "hops": 1,
    }  # fmt: skip
    torch.testing.assert_close(
        target.row(running, 203), expected([*PROMPT, 5, 6, 7], 203, [(192, "mapped"), (203, "native")])
    )
    target.decode(running, 3)
    target.finish(running)
    source.empty()
    target.empty()


def test_own_rows_win_over_mapped_ones(root: Path, page_size: int) -> None:
    source, target = (
        Engine(SMALL, root, page_size=page_size),
        Engine(LARGE, root, (MAPPER,), page_size=page_size),
    )
    target.run(PROMPT[:80])  # no exchange block of its own for 64.. is needed: it is on the device
    source.run(PROMPT, 4)
    running = target.admit(target.request([*PROMPT, 5], ask=ASK))
    own = 80 - 80 % page_size
    assert running.meta["exact"] == own and running.meta["mapped"] == 192 - own
    assert running.device == 0 and running.promised == 192
    torch.testing.assert_close(
        target.row(running, 201),
        expected([*PROMPT, 5], 201, [(own, "native"), (192, "mapped"), (201, "native")]),
    )
    target.decode(running, 2)
    target.finish(running)
    again = target.admit(target.request([*PROMPT, 5, 8, 9], ask=ASK))
    assert again.promised == 0 and again.device >= 192 - 192 % page_size
    assert again.meta["mapped"] == again.device - own and again.meta["exact"] == own
    target.decode(again, 1)
    target.finish(again)
    target.empty()


@pytest.mark.parametrize("salt", [None, "tenant-a"])
def test_lossy_rows_are_invisible_to_exact_requests(root: Path, page_size: int, salt: str | None) -> None:
    source, target = (
        Engine(SMALL, root, page_size=page_size),
        Engine(LARGE, root, (MAPPER,), page_size=page_size),
    )
    source.run(PROMPT, 4, salt=salt)
    lossy = target.run(PROMPT, 4, ask=ASK, salt=salt)
    assert lossy.meta["mapped"] > 0
    for other in (salt, "tenant-b", None, "kvhub:guess", f"kvhub:{'0' * 32}:policy:0:"):
        running = target.admit(target.request(PROMPT, salt=other))
        assert running.promised == 0
        torch.testing.assert_close(target.row(running, 200), native_rows(LARGE, PROMPT, range(200)))
        target.drop(running)
    # the lossy namespace's true name is of no use either
    secret = target.serving.salts.lossy("0" * 32, salt)
    forged = target.admit(target.request(PROMPT, ask=ASK, salt=secret))
    assert forged.meta["reason"] == "forged_salt" and forged.device == 0
    target.drop(forged)
    target.empty()


def test_another_tenant_never_meets_the_blocks(root: Path) -> None:
    source, target = Engine(SMALL, root), Engine(LARGE, root, (MAPPER,))
    source.run(PROMPT, 4, salt="tenant-a")
    for salt in (None, "tenant-b", "tenant-a "):
        running = target.run(PROMPT, ask=ASK, salt=salt)
        assert running.meta["mapped"] == 0 and running.meta["reason"] == "no_source"
    assert target.run(PROMPT, ask=ASK, salt="tenant-a").meta["mapped"] > 0


def test_the_conversation_goes_back(root: Path, page_size: int) -> None:
    """small -> large -> small: what large computed on mapped rows is a second hop."""
    small = Engine(
        SMALL, root, (BACK,), page_size=page_size, max_hops=2, lineage_mappers=[MAPPER.manifest.digest]
    )
    large = Engine(
        LARGE, root, (MAPPER,), page_size=page_size, max_hops=2, lineage_mappers=[BACK.manifest.digest]
    )
    first = small.run(PROMPT, 4, ask=ASK)
    second = [*first.tokens, *range(300, 380)]
    middle = large.run(second, 70, ask=ASK)
    assert middle.meta["hops"] == 1
    third = [*middle.tokens, *range(400, 460)]
    back = small.admit(small.request(third, ask=ASK))
    assert back.meta["reason"] == "mapped" and back.meta["hops"] == 2
    own = 203 - 203 % page_size  # what small computed itself; its last token has no row
    assert back.meta["exact"] == own and back.meta["mapped"] == (len(third) - 60) // 64 * 64 - own
    small.decode(back, 70)
    small.finish(back)
    fourth = [*back.tokens, *range(500, 570)]
    again = large.admit(large.request(fourth, ask=ASK))
    # what small computed on two hops may not be mapped a third time
    assert again.meta["mapped"] == again.device == (len(third) - 61) - (len(third) - 61) % page_size
    large.decode(again, 1)
    large.finish(again)
    for engine in (small, large):
        engine.empty()


def test_rows_mapped_before_they_were_computed(root: Path) -> None:
    """Lossy first, exact later: these take the place of the mapped ones; what lies on those stays lossy."""
    source, target = Engine(SMALL, root), Engine(LARGE, root, (MAPPER,), max_hops=2)
    source.run(PROMPT, 4)
    lossy = target.run(PROMPT, 30, ask=ASK)
    assert lossy.meta["mapped"] == 192
    target.run(PROMPT[:100])
    again = target.admit(target.request([*lossy.tokens, *range(70)], ask=ASK))
    assert again.device == len(lossy.tokens) - 1
    assert again.meta["exact"] == 100 and again.meta["mapped"] == again.device - 100
    assert again.meta["hops"] == 1
    rows = expected([*lossy.tokens, 0], again.device, [(100, "native"), (192, "mapped"), (230, "native")])
    torch.testing.assert_close(target.row(again, again.device), rows[:, :, : again.device])
    target.decode(again, 1)
    target.finish(again)
    hops = {}
    for path in root.rglob("*.kv"):
        header = target.serving.exchange.header(bytes.fromhex(path.stem))
        assert header is not None
        if header.model == LARGE.digest:
            hops.setdefault(header.position, set()).add(header.lineage.hops)
    assert hops == {0: {0, 1}, 64: {1}, 128: {1}, 192: {1}}


def test_one_hop_policy_refuses_the_second(root: Path) -> None:
    large = Engine(LARGE, root, (MAPPER,))
    small = Engine(SMALL, root, (BACK,), lineage_mappers=[MAPPER.manifest.digest])
    Engine(SMALL, root).run(PROMPT, 4)
    large.run(PROMPT, 70, ask=ASK)
    back = small.run([*PROMPT, *range(50)], ask=ASK, salt=None)
    assert back.meta["mapped"] == 0


def test_own_exact_blocks_return_after_a_restart(root: Path, page_size: int) -> None:
    Engine(LARGE, root, page_size=page_size).run(PROMPT, 4)
    restarted = Engine(LARGE, root, (MAPPER,), page_size=page_size)
    running = restarted.admit(restarted.request([*PROMPT, 1], ask=ASK))
    assert running.meta["exact"] == 192 and running.meta["mapped"] == 0 and running.meta["reason"] == "exact"
    torch.testing.assert_close(restarted.row(running, 201), native_rows(LARGE, [*PROMPT, 1], range(201)))
    restarted.decode(running, 2)
    restarted.finish(running)
    plain = restarted.run([*PROMPT, 1])
    assert plain.device >= 192 and plain.meta["reason"] == "not_asked"
    assert (plain.meta["exact"], plain.meta["prefilled"]) == (plain.device, 201 - plain.device)
    restarted.empty()


def test_exact_prefix_is_demanded(root: Path) -> None:
    careful = mapper_between(SMALL, LARGE, exact_prefix=4)
    Engine(SMALL, root).run(PROMPT, 4)
    target = Engine(LARGE, root, (careful,))
    assert target.run(PROMPT, ask=ASK).meta["reason"] == "exact_prefix"
    target.run([*PROMPT[:10], 1, 2, 3])
    with_prefix = target.run([*PROMPT, 9], ask=ASK)
    assert with_prefix.meta["mapped"] > 0 or with_prefix.meta["exact"] >= 192
    target.empty()


@pytest.mark.parametrize("chunk", [None, 64])
def test_a_request_that_nobody_speaks_for_is_no_work_before_its_first_token(
    root: Path, monkeypatch: pytest.MonkeyPatch, chunk: int | None
) -> None:
    target = Engine(LARGE, root, (MAPPER,), internal=True)
    req = target.request(PROMPT)
    with monkeypatch.context() as patched:
        patched.setattr("kvhub_sglang.handoff.new_plan", None)
        patched.setattr(target.cache, "_promise", None)
        target.cache.arrived(req)
        running = target.admit(req, chunk)
    assert target.cache.off_because == "" and req.customized_info is None
    while req.extend_end < len(PROMPT):
        target.extend(running, 64)
    target.decode(running, 1)
    assert (running.meta["reason"], running.meta["exact"], running.meta["prefilled"]) == ("not_asked", 0, 200)
    target.drop(running)  # retracted: what is said of it is decided anew
    again = target.admit(req)
    target.decode(again, 1)
    assert again.meta["exact"] + again.meta["prefilled"] == 200 and again.meta["mapped"] == 0
    target.finish(again)
    target.empty()


def test_requests_that_do_not_ask_are_left_alone(root: Path) -> None:
    Engine(SMALL, root).run(PROMPT, 4)
    target = Engine(LARGE, root, (MAPPER,))
    assert target.run(PROMPT).meta["reason"] == "not_asked"
    assert target.run([*PROMPT, 1], ask={"reuse": False}).meta["reason"] == "declined"
    assert target.run([3, *PROMPT], ask={"reuse": True, "sources": ["nobody"]}).meta["mapped"] == 0
    assert target.run([4, *PROMPT], ask={"reuse": "yes"}).meta["reason"] == "declined"
    elsewhere = root.with_name("elsewhere")
    Engine(SMALL, elsewhere).run(PROMPT, 4)
    always = Engine(LARGE, elsewhere, (MAPPER,), reuse="always")
    assert always.run(PROMPT).meta["mapped"] == 192
    assert always.run([*PROMPT, 1], ask={"reuse": False}).meta["mapped"] == 0
