"""What kvhub costs a server that does not use it: TTFT beside stock SGLang; results/overhead.json.

    python -m benchmarks.overhead [--model small] [--requests 600] [--lengths 64 512]

Two servers at once on the same model: stock SGLang, and SGLang with kvhub loaded, a mapper ready, an
exchange and publishing as they are by default. Requests do not ask for reuse. A pair is one prompt asked
of both, one after the other, in an order that alternates; each prompt is new to both. The ratio is kvhub /
stock of the time to the first streamed token, so above 1 kvhub is slower. The interval is a 95 % bootstrap
over pairs of the ratio of the geometric means.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from typing import Any

import numpy as np

from benchmarks import machine, servers
from benchmarks.servers import Server

TOKENS = 4
"""Asked of each request: the finish, with its publishing, is not inside the first one's time."""


def measure(pair: dict[str, Server], prompts: list[list[int]], pause: float) -> dict[str, list[list[float]]]:
    """`[first, total]` milliseconds of each prompt on each server, interleaved."""
    found: dict[str, list[list[float]]] = {name: [] for name in pair}
    for number, prompt in enumerate(prompts):
        for name in sorted(pair, reverse=bool(number % 2)):
            answer = pair[name].stream(prompt, TOKENS, timeout=300)
            found[name].append([answer.first_ms, answer.total_ms])
            time.sleep(pause)  # what the other server still does for its last request is not measured
    return found


def ratio(ours: list[float], stock: list[float], *, seed: int = 0, draws: int = 4000) -> dict[str, float]:
    """exp of the mean log ratio over pairs, with a 95 % bootstrap interval over pairs."""
    logs = np.log(np.asarray(ours) / np.asarray(stock))
    picks = np.random.default_rng(seed).integers(0, len(logs), (draws, len(logs)))
    low, high = np.quantile(np.exp(logs[picks].mean(axis=1)), (0.025, 0.975))
    return {
        "ratio": round(float(np.exp(logs.mean())), 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
        "median_of_ratios": round(float(np.median(np.exp(logs))), 4),
        "n": len(logs),
    }


def trimmed(ours: list[float], stock: list[float], share: float = 0.05) -> dict[str, float]:
    """The same without the `share` of pairs with the highest and the lowest ratio (interruptions)."""
    logs = np.log(np.asarray(ours) / np.asarray(stock))
    low, high = np.quantile(logs, (share, 1 - share))
    kept = (logs >= low) & (logs <= high)
    return ratio(list(np.asarray(ours)[kept]), list(np.asarray(stock)[kept]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="large", choices=["small", "large"])
    parser.add_argument("--requests", type=int, default=400, help="pairs per length")
    parser.add_argument("--warmup", type=int, default=40, help="pairs per length that are not counted")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between requests")
    parser.add_argument("--home", help="KVHUB_HOME with a mapper (default: fit one first)")
    parser.add_argument("--control", action="store_true", help="stock against stock, to see what noise gives")
    parser.add_argument("--name", default="overhead")
    arguments = parser.parse_args()
    ids = servers.token_ids(slice(0, 400000))
    result: dict[str, Any] = {
        "what": "TTFT with kvhub loaded but not asked for, over stock SGLang's; interleaved pairs",
        "model": arguments.model,
        "control": arguments.control,
        "machine": machine.describe(),
        "lengths": [],
    }
    with contextlib.ExitStack() as stack:
        flags = ["--max-total-tokens", "32768"]
        stock = servers.start_stock(stack, arguments.model, flags=flags)
        if arguments.control:
            ours = servers.start_stock(stack, arguments.model, flags=flags)
        else:
            home = stack.enter_context(servers.fitted_home(arguments.home))
            exchange = stack.enter_context(servers.exchange_directory())
            ours = servers.start(
                stack, arguments.model, home, exchange, settings={"worth": "auto"}, flags=flags
            )
        for server in (stock, ours):
            server.wait(servers.PATIENCE)
        start = 0
        for length in arguments.lengths:
            prompts = []
            for _ in range(arguments.warmup + arguments.requests):
                # a first token of its own makes every prompt new to both servers
                prompts.append([3 + start % 4000, *ids[start % 90000 :][: length - 1]])
                start += 17
            found = measure({"kvhub": ours, "stock": stock}, prompts, arguments.pause)
            counted = {name: np.asarray(rows[arguments.warmup :]) for name, rows in found.items()}
            first = [list(counted[name][:, 0]) for name in ("kvhub", "stock")]
            total = [list(counted[name][:, 1]) for name in ("kvhub", "stock")]
            row = {
                "tokens": length,
                "ttft": ratio(*first),
                "ttft_trimmed_5_percent": trimmed(*first),
                "whole_request": ratio(*total),
                "stock_ttft_ms": {
                    "p50": round(float(np.median(first[1])), 2),
                    "p95": round(float(np.quantile(first[1], 0.95)), 2),
                },
                "kvhub_ttft_ms": {
                    "p50": round(float(np.median(first[0])), 2),
                    "p95": round(float(np.quantile(first[0], 0.95)), 2),
                },
            }
            result["lengths"].append(row)
            print(json.dumps(row), flush=True)
        result["load_average_at_the_end"] = os.getloadavg()
        print(machine.write(arguments.name, result))


if __name__ == "__main__":
    main()
