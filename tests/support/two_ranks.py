"""What the two ranks of `support.ranks` go through; each scenario runs on both, in the same order."""

from __future__ import annotations

import random
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from support.ranks import LIMIT, SCENARIOS, Rank, run, scenario

__all__ = ["SCENARIOS", "run"]

PROMPT = [(i * 37 + 11) % 997 for i in range(200)]
ASK = {"reuse": True}


# ---- what is agreed


@scenario
def values_are_shared(rank: Rank, root: Path) -> Any:
    ranks = rank.ranks()
    mine = {"short": ["a", 1, None], "long": ["b" * 5000]}
    return [
        ranks.share([rank.number, "x"]),
        ranks.share(mine["short"] if rank.number == 0 else 0),
        ranks.share(mine["long"] if rank.number == 0 else 0) == mine["long"],
        [ranks.all(True), ranks.all(rank.number == 0), ranks.least(5 - rank.number)],
    ]


@scenario
def a_rank_that_failed_stops_both(rank: Rank, root: Path) -> Any:
    ranks, said = rank.ranks(), []
    if rank.number == 1:
        ranks.failed = "no memory"
    for call in (lambda: ranks.share(1), lambda: ranks.all(True)):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    return said


@scenario
def ranks_at_different_points_stop_at_once(rank: Rank, root: Path) -> Any:
    ranks, started = rank.ranks(), time.monotonic()
    try:
        _ = ranks.share(1) if rank.number else ranks.all(True)
    except RuntimeError as error:
        return [str(error), time.monotonic() - started < LIMIT.total_seconds() / 2]
    return None


@scenario
def a_rank_that_does_not_answer_is_given_up(rank: Rank, root: Path) -> Any:
    ranks = rank.ranks(timedelta(seconds=1))
    said = ""
    if rank.number == 0:
        try:
            ranks.all(True)
        except RuntimeError as error:
            said = str(error).split(":")[0]
    rank.same_moment()
    return said


@scenario
def different_settings_are_refused(rank: Rank, root: Path) -> Any:
    from support.pools import LARGE

    try:
        rank.engine(LARGE, root, max_hops=1 + rank.number)
    except Exception as error:
        return str(error)
    return None


# ---- handoffs


def _expected(rank: Rank, spans: list[tuple[int, str]], tokens: list[int]) -> Any:
    """This rank's head of the large model's rows."""
    import torch
    from support.pools import LARGE, SMALL, mapped_rows, mapper_between, native_rows

    parts, start = [], 0
    for end, origin in spans:
        where, what = range(start, end), tokens[start:end]
        mapped = mapped_rows(mapper_between(SMALL, LARGE), native_rows(SMALL, what, where), where)
        parts.append(native_rows(LARGE, what, where) if origin == "native" else mapped)
        start = end
    return torch.cat(parts, dim=2)[:, :, :, rank.number : rank.number + 1]


def _outcome(running: Any) -> list[Any]:
    meta = running.meta
    return [
        running.device,
        running.promised,
        running.loaded,
        *(meta[k] for k in ("exact", "mapped", "prefilled")),
    ]


@scenario
def a_source_without_ranks(rank: Rank, root: Path) -> Any:
    import torch
    from support.pools import LARGE, SMALL, Engine, mapper_between

    rank.publish_alone(SMALL, root, PROMPT)
    target = rank.engine(LARGE, root, mapper_between(SMALL, LARGE))
    running = target.admit(target.request([*PROMPT, 5, 6, 7], ask=ASK))
    tokens = [*PROMPT, 5, 6, 7]
    right = torch.allclose(
        target.row(running, 203), _expected(rank, [(192, "mapped"), (203, "native")], tokens), atol=1e-5
    )
    result = [_outcome(running), right, running.meta["reason"]]
    target.decode(running, 3)
    target.finish(running)
    target.empty()
    # what both ranks publish, a server of degree 1 takes as its own
    other = [(i * 41 + 3) % 997 for i in range(150)]
    target.run(other, 4)
    rank.same_moment()
    with rank.first_alone() as alone:
        if alone:
            from kvhub_sglang.ranks import OneRank

            whole = Engine(LARGE, root, ranks=OneRank())
            again = whole.admit(whole.request([*other, 9], ask=ASK))
            rows = whole.native([*other, 9], range(151))
            result += [again.meta["exact"], torch.equal(whole.row(again, 151), rows)]
    return result


@scenario
def a_source_with_ranks_and_heads_held_twice(rank: Rank, root: Path) -> Any:
    """Large (two heads) on two ranks to small (one head) on two ranks, and on one."""
    import torch
    from support.pools import LARGE, SMALL, Engine, mapped_rows, mapper_between, native_rows

    from kvhub_sglang.ranks import OneRank

    back = mapper_between(LARGE, SMALL)
    rank.engine(LARGE, root).run(PROMPT, 4)
    rank.same_moment()
    tokens = [*PROMPT, 5]
    expected = mapped_rows(back, native_rows(LARGE, tokens[:192], range(192)), range(192))
    target = rank.engine(SMALL, root, back)
    running = target.admit(target.request(tokens, ask=ASK))
    result = [_outcome(running), torch.allclose(target.row(running, 192), expected, atol=1e-5)]
    target.decode(running, 1)
    target.finish(running)
    rank.same_moment()
    published = len(list(root.rglob("*.kv")))
    with rank.first_alone() as alone:
        if alone:
            whole = Engine(SMALL, root, (back,), ranks=OneRank())
            again = whole.admit(whole.request([*PROMPT, 7], ask=ASK))
            result += [_outcome(again), torch.allclose(whole.row(again, 192), expected, atol=1e-5)]
    return [*result, published]


@scenario
def a_damaged_piece_shortens_the_span_on_both(rank: Rank, root: Path) -> Any:
    from support.pools import LARGE, SMALL, mapper_between

    from kvhub.exchange import Namespace, chain_keys
    from kvhub.exchange.shards import piece_key

    rank.engine(LARGE, root).run(PROMPT, 4)
    rank.same_moment()
    key = chain_keys(Namespace(LARGE.digest, "exact"), PROMPT)[2]
    with rank.first_alone() as alone:
        if alone:
            [path] = root.rglob(f"{piece_key(key, 1, 2).hex()}.kv")
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    twin = rank.engine(LARGE, root, mapper_between(SMALL, LARGE))
    running = twin.admit(twin.request([*PROMPT, 5], ask=ASK))
    return [_outcome(running), rank.number]


@scenario
def rows_that_are_not_finite_on_one_rank(rank: Rank, root: Path) -> Any:
    import torch
    from support.pools import LARGE, SMALL, mapper_between

    from kvhub_sglang.refusal import Code, Refusal

    rank.publish_alone(SMALL, root, PROMPT)
    target = rank.engine(LARGE, root, mapper_between(SMALL, LARGE))
    with rank.mapping(1, lambda: Refusal(Code.NOT_FINITE, "on purpose")):
        running = target.admit(target.request([*PROMPT, 5], ask=ASK))
    native = torch.equal(target.row(running, 201), target.native([*PROMPT, 5], range(201)))
    result = [_outcome(running), native, running.meta["reason"], target.cache.serving is not None]
    target.decode(running, 1)
    target.finish(running)
    target.empty()
    return result


@scenario
def an_unexpected_error_on_one_rank(rank: Rank, root: Path) -> Any:
    import torch
    from support.pools import LARGE, SMALL, mapper_between

    rank.publish_alone(SMALL, root, PROMPT)
    target = rank.engine(LARGE, root, mapper_between(SMALL, LARGE))
    result: list[Any] = []
    for extra in (5, 6):
        with rank.mapping(1, ZeroDivisionError):
            running = target.admit(target.request([*PROMPT, extra], ask=ASK))
        native = torch.equal(target.row(running, 201), target.native([*PROMPT, extra], range(201)))
        result.append([native, running.loaded, target.cache.serving is None])
        target.decode(running, 1)
        target.finish(running)
    target.empty()
    return [*result, target.cache.off_because]


@scenario
def one_rank_cannot_begin_to_read(rank: Rank, root: Path) -> Any:
    from support.pools import LARGE, SMALL, mapper_between

    rank.publish_alone(SMALL, root, PROMPT)
    target = rank.engine(LARGE, root, mapper_between(SMALL, LARGE))
    result = []
    for failing in (0, 1):
        breaker = target.serving.stager.breaker
        if rank.number == failing:
            breaker.failed()
        running = target.admit(target.request([*PROMPT, failing], ask=ASK))
        breaker.succeeded()
        result.append([_outcome(running), running.meta["reason"]])
        target.drop(running)
    return result


@scenario
def one_rank_reads_too_slowly(rank: Rank, root: Path) -> Any:
    from support.pools import LARGE, SMALL, mapper_between

    rank.publish_alone(SMALL, root, PROMPT)
    target = rank.engine(LARGE, root, mapper_between(SMALL, LARGE), stage_wait_ms=600)
    if rank.number == 1:
        pieces = target.serving.exchange.pieces
        get = pieces.get

        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(2)
            return get(*args, **kwargs)

        pieces.get = slow
    running = target.admit(target.request([*PROMPT, 5], ask=ASK))
    result = [_outcome(running), running.meta["reason"]]
    target.drop(running)
    target.empty()
    return result


@scenario
def many_requests_in_step(rank: Rank, root: Path) -> Any:
    """Random turns on two servers of degree 2, a small pool, faults on one rank: both do the same."""
    import torch
    from support.faults import FaultyExchange
    from support.pools import LARGE, SMALL, mapper_between

    exchange = FaultyExchange(root)
    small = rank.engine(SMALL, root, mapper_between(LARGE, SMALL), slots=700, max_hops=2)
    large = rank.engine(LARGE, root, mapper_between(SMALL, LARGE), slots=700, max_hops=2, exchange=exchange)
    chance = random.Random(4)
    conversations = [[chance.randrange(997) for _ in range(90)] for _ in range(5)]
    seen, wrong = [], 0
    for step in range(60):
        number = chance.randrange(5)
        engine = chance.choice([small, large])
        tokens = conversations[number] + [chance.randrange(997) for _ in range(chance.randrange(1, 40))]
        ask, drop, fault = chance.random() < 0.8, chance.random() < 0.1, chance.random() < 0.2
        if rank.number == 1 and fault:
            exchange.fail["get"] = OSError(5, "injected")
        running = engine.admit(engine.request(tokens[:300], ask=ASK if ask else None))
        exchange.fail.clear()
        seen.append(_outcome(running))
        if not ask:
            rows = engine.native(tokens[:300], range(len(tokens[:300])))
            wrong += not torch.equal(engine.row(running, len(tokens[:300])), rows)
        if drop:
            engine.drop(running)
            continue
        engine.decode(running, 3)
        conversations[number] = running.tokens[:260]
        engine.finish(running)
        rank.same_moment()
        if step % 20 == 19:
            conversations[number] = [chance.randrange(997) for _ in range(70)]
    small.empty()
    large.empty()
    mapped = sum(outcome[4] for outcome in seen)
    return [seen, wrong, mapped, large.cache.serving is not None]
