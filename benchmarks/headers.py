"""Headers of 64 blocks one by one and in one call, side by side; results/headers.json.

    python -m benchmarks.headers

A Mooncake store on the loopback interface (where its client is installed) and a directory, each with 64
blocks that are there and 64 that are not. The ratio is that of the two ways in one round; 30 rounds, the
order turned each time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from support import mooncake

from benchmarks import machine
from kvhub.exchange import EXACT, DirectoryExchange, Exchange, Layout, Namespace, chain_keys

COUNT, ROUNDS = 64, 30
LAYOUT = Layout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="bfloat16")
MODEL = "a" * 64
TOKENS = list(range(COUNT * 64))


def measure(exchange: Exchange) -> dict[str, Any]:
    """Milliseconds for all headers, and the ratio of one by one to together."""
    there = chain_keys(Namespace(MODEL, "exact"), TOKENS)
    absent = chain_keys(Namespace(MODEL, "lossy"), TOKENS)
    rows = torch.zeros(LAYOUT.shape, dtype=torch.bfloat16)
    for key in there:
        exchange.put(key, model=MODEL, position=0, layout=LAYOUT, lineage=EXACT, payload=rows)
    found: dict[str, Any] = {}
    for name, keys in (("there", there), ("absent", absent)):
        ways: dict[str, Callable[[list[bytes]], Any]] = {
            "one_by_one": lambda keys: [exchange.header(key) for key in keys],
            "together": exchange.headers,
        }
        assert ways["one_by_one"](keys) == ways["together"](keys)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for round_ in range(ROUNDS):
            for way in sorted(ways, reverse=bool(round_ % 2)):
                started = time.perf_counter()
                ways[way](keys)
                times[way].append((time.perf_counter() - started) * 1e3)
        ratios = [a / b for a, b in zip(times["one_by_one"], times["together"], strict=True)]
        found[name] = {"ratio": machine.interval(ratios)} | {
            f"{way}_ms": machine.interval(taken)["median"] for way, taken in times.items()
        }
    return found


def main() -> None:
    result: dict[str, Any] = {
        "headers": COUNT,
        "excluded": "payloads; a network, whose latency is where one call gains most",
        "machine": machine.describe(),
    }
    with tempfile.TemporaryDirectory(prefix="kvhub-bench-") as place:
        result["directory"] = measure(DirectoryExchange(Path(place) / "exchange"))
        if mooncake.missing() is None:
            from kvhub.exchange.mooncake import open_mooncake

            with mooncake.store(Path(place)) as running:
                result["mooncake"] = measure(open_mooncake(running.url))
    for where in ("directory", "mooncake"):
        for name, row in result.get(where, {}).items():
            print(
                f"{where:<10} {name:<7} {row['one_by_one_ms']:.1f} ms, together {row['together_ms']:.1f} ms"
            )
    print(machine.write("headers", result))


if __name__ == "__main__":
    main()
