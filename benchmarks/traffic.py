"""Handoffs under concurrency, stage by stage, and throughput under mixed load; results/traffic-NAME.json.

    python -m benchmarks.traffic cells [--lengths 256 512 1024 2000] [--concurrent 1 2 4 8]
    python -m benchmarks.traffic mixed [--seconds 20] [--rounds 4]

cells: for every length and concurrency, texts that the source has answered are asked of the target, half
of them with reuse and half without, in alternating rounds of `concurrent` requests at once; each text is
new to the target. p50 and p95 of the time to the first token, and what it consists of: `staged` (a worker's
look-up, transport and checks), `waited` (from arrival to decision), `apply` (the scheduler's thread: decide,
allocate, map, write). The source's own prefill, which belongs to the turn before, and its publishing stand
beside.

mixed: conversations of several turns from eight clients, for a while with reuse and for a while without, in
turn; in requests and prompt tokens a second. Both servers take part, so switching costs a prefill where
nothing is reused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks import machine, servers
from benchmarks.servers import Server, hints, report
from kvhub.serving.exposition import scrape

TOKENS = 2


def ask(server: Server, prompt: Sequence[int], *, reuse: bool, tokens: int = TOKENS) -> dict[str, Any]:
    """Milliseconds to the first streamed token and to the end, kvhub's report, and the answer."""
    fields = {"kv_hints": hints()} if reuse else {}
    found = server.stream(prompt, tokens, timeout=600, **fields)
    answer = found.last["output_ids"]
    return {"ttft": found.first_ms, "total": found.total_ms, "report": report(found.last), "answer": answer}


def spread(values: list[float]) -> dict[str, float]:
    """p50 and p95 of milliseconds."""
    return {
        "p50": round(float(np.quantile(values, 0.5)), 2),
        "p95": round(float(np.quantile(values, 0.95)), 2),
        "n": len(values),
    }


def cell(
    source: Server, target: Server, texts: list[list[int]], concurrent: int
) -> dict[str, dict[str, float]]:
    """One length and concurrency; texts: twice a multiple of `concurrent`, all new."""
    found: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    prefill: list[float] = []
    rounds = [texts[i : i + concurrent] for i in range(0, len(texts), concurrent)]
    before = scrape(source.url)
    with ThreadPoolExecutor(concurrent) as pool:
        for number, chosen in enumerate(rounds):
            prefill += [one["ttft"] for one in pool.map(lambda t: ask(source, t, reuse=False), chosen)]
            reuse = bool((number + number // 2) % 2)  # off, on, on, off, ...
            found[reuse] += pool.map(lambda t, r=reuse: ask(target, t, reuse=r), chosen)  # type: ignore[misc]
    published = scrape(source.url).since(before)
    count = published.total("kvhub_stage_seconds_count", stage="publish")
    reports = [one["report"] for one in found[True]]
    return {
        "reuse_ttft_ms": spread([one["ttft"] for one in found[True]]),
        "prefill_ttft_ms": spread([one["ttft"] for one in found[False]]),
        "prefill_over_reuse": ratio_of_medians(*[[one["ttft"] for one in found[r]] for r in (False, True)]),
        "staged_ms": spread([report.get("staged_ms", 0.0) for report in reports]),
        "waited_ms": spread([report.get("waited_ms", 0.0) for report in reports]),
        "apply_ms": spread([report["ms"] for report in reports]),
        "source_prefill_ttft_ms": spread(prefill),
        "source_publish_ms": {
            "mean": round(
                published.total("kvhub_stage_seconds_sum", stage="publish") / max(count, 1) * 1e3, 2
            )
        },
        "mapped_tokens": {"p50": float(np.median([report["mapped"] for report in reports]))},
        "not_mapped": {"requests": sum(report["mapped"] == 0 for report in reports)},
    }


def ratio_of_medians(above: list[float], below: list[float], draws: int = 4000) -> dict[str, float]:
    """Median over median, with a 95 % bootstrap interval over the requests of each."""
    rng = np.random.default_rng(0)
    medians = [
        np.median(np.asarray(side)[rng.integers(0, len(side), (draws, len(side)))], axis=1)
        for side in (above, below)
    ]
    low, high = np.quantile(medians[0] / medians[1], (0.025, 0.975))
    found = float(np.median(above) / np.median(below))
    return {"ratio": round(found, 3), "low": round(float(low), 3), "high": round(float(high), 3)}


def cells(source: Server, target: Server, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    ids = servers.token_ids(slice(0, 800000))
    rows, start = [], 0
    for length in arguments.lengths:
        for concurrent in arguments.concurrent:
            rounds = max(2, -(-arguments.requests // concurrent))
            rounds += rounds % 2
            texts = []
            for _ in range(2 * rounds * concurrent):
                # a first token of its own makes every text new to both servers
                texts.append([3 + start % 4000, *ids[(start * 13) % 100000 :][: length - 1]])
                start += 1
            row = {"tokens": length, "concurrent": concurrent, **cell(source, target, texts, concurrent)}
            rows.append(row)
            print(json.dumps(row), flush=True)
            target.flush()
            source.flush()
    return rows


def mixed(pair: dict[str, Server], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Windows with and without reuse, in turn; a window's numbers count what ended in it."""
    ids = servers.token_ids(slice(0, 800000))
    windows = []
    for number in range(2 * arguments.rounds):
        reuse = bool((number + number // 2) % 2)
        for server in pair.values():
            server.flush()
        stop = time.monotonic() + arguments.seconds
        done: list[dict[str, Any]] = []

        def client(seed: int, reuse: bool = reuse, stop: float = stop, done: list[Any] = done) -> None:
            choose = random.Random(seed)
            while time.monotonic() < stop:
                offset = choose.randrange(100000)
                history = [3 + choose.randrange(4000), *ids[offset : offset + choose.choice([200, 400, 800])]]
                for turn in range(choose.randrange(2, 6)):
                    name = ("small", "large")[turn % 2]
                    said = ask(pair[name], history, reuse=reuse, tokens=choose.choice([4, 16, 32]))
                    if time.monotonic() >= stop:
                        return
                    done.append({**said, "prompt": len(history), "turn": turn, "server": name})
                    history = [*history, *said["answer"], *ids[offset + 900 : offset + 900 + 80]]

        threads = [
            threading.Thread(target=client, args=(1000 * number + n,)) for n in range(arguments.clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        switched = [one for one in done if one["turn"] > 0]
        window = {
            "reuse": reuse,
            "requests_per_second": round(len(done) / arguments.seconds, 2),
            "prompt_tokens_per_second": round(sum(one["prompt"] for one in done) / arguments.seconds, 1),
            "ttft_ms_after_a_switch": spread([one["ttft"] for one in switched]) if switched else None,
            "tokens": {
                key: sum(one["report"].get(key, 0) for one in done)
                for key in ("exact", "mapped", "prefilled")
            },
        }
        windows.append(window)
        print(json.dumps(window), flush=True)
    return windows


def compared(windows: list[dict[str, Any]]) -> dict[str, Any]:
    """Reuse over no reuse, neighbouring windows paired."""
    pairs = [sorted(windows[i : i + 2], key=lambda w: bool(w["reuse"])) for i in range(0, len(windows), 2)]
    return {
        key: machine.interval([with_[key] / without[key] for without, with_ in pairs])
        for key in ("requests_per_second", "prompt_tokens_per_second")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["cells", "mixed"])
    parser.add_argument("--name", default="shipped", help="results/traffic-WHAT-NAME.json")
    parser.add_argument("--home", help="KVHUB_HOME with both mappers (default: fit them first)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2000])
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=8, help="with reuse, per cell (and as many without)")
    parser.add_argument("--seconds", type=float, default=20, help="of a window of mixed load")
    parser.add_argument("--rounds", type=int, default=4, help="pairs of windows")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON: serving settings to change")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "what": __doc__.split("\n\n")[2 if arguments.what == "cells" else 3],
        "pair": "shipped small -> large, all layers, float32, one thread per server",
        "settings": arguments.settings,
        "machine": machine.describe(),
    }
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(servers.fitted_home(arguments.home))
        exchange = stack.enter_context(servers.exchange_directory())
        settings = {"exchange_max_bytes": 2 << 30, "max_hops": 2, "stage_wait_ms": 5000, **arguments.settings}
        flags = ["--enable-metrics", "--max-total-tokens", "49152"]
        pair = {
            name: servers.start(stack, name, home, exchange, settings=settings, flags=flags)
            for name in ("small", "large")
        }
        for server in pair.values():
            server.wait(servers.PATIENCE)
        for server in pair.values():  # the first request of a process is slow
            ask(server, servers.token_ids(slice(0, 4000))[:300], reuse=True)
        if arguments.what == "cells":
            result["cells"] = cells(pair["small"], pair["large"], arguments)
        else:
            result["windows"] = mixed(pair, arguments)
            result["reuse_over_none"] = compared(result["windows"])
    print(machine.write(f"traffic-{arguments.what}-{arguments.name}", result))


if __name__ == "__main__":
    main()
