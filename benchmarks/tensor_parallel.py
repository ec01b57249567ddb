"""A conversation between servers of tensor-parallel degree 1 and 2; results/tensor_parallel.json.

    python -m benchmarks.tensor_parallel --home HOME

The shipped pair on the CPU engine, ranks over gloo: `small` and `large` of degree 1 and
`large` of degree 2, one exchange. Each prompt has a tenant of its own per check, so that
nothing is met by accident. Checked, for every prompt:

  native    the answer of degree 2 without reuse is that of degree 1
  mapped    small's blocks, mapped by degree 2 (every head of the source, half the heads of the
            target on each rank): as many tokens as by degree 1, and its greedy answer
  pieces    what degree 2 published is taken by degree 1 as its own exact blocks: native answer
  whole     what degree 1 published is taken by degree 2 as its own exact blocks: native answer
  back      what degree 2 published is mapped by small
  lost      every second piece deleted, by age: a block that lacks one is used by neither rank, native answer

Ranks add floats in another order than one process, so a greedy answer may part where two
tokens are nearly equal; the answers' common length says where. Exact mode reports `wrong`:
answers that parted although the native ones of both degrees agree.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import machine, servers
from benchmarks.servers import Server

NEW_TOKENS = 24


def ask(server: Server, prompt: list[int], tenant: str, *, reuse: bool = False) -> dict[str, Any]:
    """Greedy answer, and kvhub's report on it."""
    hints = {"kv_hints": servers.hints()} if reuse else {}
    answer = server.generate(prompt, NEW_TOKENS, cache_salt=tenant, **hints)
    report = servers.report(answer)
    return {
        "ids": answer["output_ids"],
        **{k: report.get(k) for k in ("exact", "mapped", "reason", "detail")},
    }


def common(first: list[int], second: list[int]) -> int:
    """Tokens before two answers part."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b), len(first))


def blocks(exchange: Path) -> set[Path]:
    return set(exchange.rglob("*.kv"))


def settled(exchange: Path, before: set[Path], count: int, seconds: float = 30) -> set[Path]:
    """The files written since `before`, once there are `count`."""
    deadline = time.monotonic() + seconds
    while len(fresh := blocks(exchange) - before) < count and time.monotonic() < deadline:
        time.sleep(0.05)
    return fresh


def exercise(
    small: Server, one: Server, two: Server, exchange: Path, prompts: list[list[int]]
) -> dict[str, Any]:
    """All checks; one: `large` of degree 1, two: of degree 2."""
    found: dict[str, Any] = {"prompts": len(prompts), "prompt_tokens": [len(p) for p in prompts]}
    native = [ask(one, p, f"native-{i}")["ids"] for i, p in enumerate(prompts)]
    sharded = [ask(two, p, f"native-{i}-two")["ids"] for i, p in enumerate(prompts)]
    agree = [common(a, b) == NEW_TOKENS for a, b in zip(native, sharded, strict=True)]
    found["native"] = {"equal": sum(agree), "common": list(map(common, native, sharded))}
    wrong, rows = 0, []
    for i, prompt in enumerate(prompts):
        full = len(prompt) // 64
        row: dict[str, Any] = {}
        ask(small, prompt, f"mapped-{i}")
        by_two = ask(two, prompt, f"mapped-{i}", reuse=True)
        by_one = ask(one, prompt, f"mapped-{i}", reuse=True)
        row["mapped"] = {"two": by_two["mapped"], "one": by_one["mapped"], "reason": by_two["reason"]}
        row["mapped"]["common"] = common(by_two["ids"], by_one["ids"])

        before = blocks(exchange)
        ask(two, prompt, f"pieces-{i}")
        row["pieces_published"] = len(settled(exchange, before, 2 * full))
        whole = ask(one, prompt, f"pieces-{i}", reuse=True)
        row["pieces"] = {"exact": whole["exact"], "common": common(whole["ids"], native[i])}
        back = ask(small, prompt, f"pieces-{i}", reuse=True)
        row["back"] = {"mapped": back["mapped"], "reason": back["reason"]}

        ask(one, prompt, f"whole-{i}")
        part = ask(two, prompt, f"whole-{i}", reuse=True)
        row["whole"] = {"exact": part["exact"], "common": common(part["ids"], native[i])}

        before = blocks(exchange)
        ask(two, prompt, f"lost-{i}")
        fresh = sorted(settled(exchange, before, 2 * full), key=lambda p: p.stat().st_mtime_ns)
        two.flush()
        for path in fresh[::2]:
            path.unlink()
        lost = ask(two, prompt, f"lost-{i}", reuse=True)
        row["lost"] = {"exact": lost["exact"], "reason": lost["reason"]}
        row["lost"]["common"] = common(lost["ids"], native[i])
        exact = [row[name]["common"] for name in ("pieces", "whole", "lost")]
        wrong += sum(length != NEW_TOKENS for length in exact) if agree[i] else 0
        rows.append(row)
        print(row, flush=True)
    return {**found, "wrong": wrong, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--home", help="KVHUB_HOME with mappers of the shipped pair; fitted if absent")
    parser.add_argument("--prompts", type=int, default=8)
    chosen = parser.parse_args()
    ids = servers.token_ids(slice(20000, 90000))
    prompts = [ids[i * 400 : i * 400 + 200 + 37 * i] for i in range(chosen.prompts)]
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(servers.fitted_home(chosen.home))
        exchange = stack.enter_context(servers.exchange_directory())
        patient = {"stage_wait_ms": 20000, "publish_wait_ms": 10000}
        bind = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[i % len(cores)]) for i in range(2))}
        pool = ["--max-total-tokens", "8192"]
        options: list[tuple[str, dict[str, Any]]] = [
            ("small", {"flags": pool}),
            ("large", {"flags": pool}),
            ("large", {"flags": [*pool, "--tp-size", "2"], "environment": bind}),
        ]
        live = [servers.start(stack, name, home, exchange, settings=patient, **o) for name, o in options]
        for server in live:
            server.wait(servers.PATIENCE)
        small, one, two = live
        log = two.log.read_text(errors="replace")
        assert log.count("kvhub on 2 ranks") == 2, log[-3000:]
        result = exercise(small, one, two, exchange, prompts)
        log = two.log.read_text(errors="replace")
        assert two.process.poll() is None and "kvhub is off" not in log, log[-3000:]
        result["errors_in_log"] = log.count("kvhub failed")
    print(machine.write("tensor_parallel", {"machine": machine.describe(), **result}))


if __name__ == "__main__":
    main()
