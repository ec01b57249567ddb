"""What kvhub costs a server that does not use it: TTFT beside stock SGLang; results/overhead.json.

    python -m benchmarks.overhead [--model small] [--starts 4] [--requests 400] [--lengths 64 512]
    python -m benchmarks.overhead --model QWEN-1.5B --source QWEN-0.5B --home HOME --dtype bfloat16 \
        --name overhead-qwen2.5-coder

Two servers at once on the same model: stock SGLang, and SGLang with kvhub loaded, a mapper ready, an
exchange and publishing as they are by default. Requests do not ask for reuse. A pair is one prompt asked
of both, one after the other, in an order that alternates; each prompt is new to both. The ratio is kvhub /
stock of the time to the first streamed token, so above 1 kvhub is slower. The interval is a 95 % bootstrap
over pairs of the ratio of the geometric means. Two processes of the same program differ by some per cent
for as long as they live (where their memory lies), so both are started anew several times, in either order,
without randomised addresses where `setarch` is there, and the ratio of each start is kept beside the whole,
with an interval over starts (Student's t), which pairs alone make too narrow:
`--control`, stock against stock, shows the same spread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

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


def over_starts(ratios: list[float]) -> dict[str, float] | None:
    """Each start as one number: mean of the log ratios, 95 % by Student's t. None for a single start."""
    if len(ratios) < 2:
        return None
    logs = np.log(np.asarray(ratios))
    half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs))
    middle = float(logs.mean())
    return {
        "ratio": round(float(np.exp(middle)), 4),
        "low": round(float(np.exp(middle - half)), 4),
        "high": round(float(np.exp(middle + half)), 4),
    }


def run(
    arguments: argparse.Namespace, home: str, ids: list[int], number: int
) -> dict[int, dict[str, list[list[float]]]]:
    """By length: what one start of both servers took, its share of the pairs, the first ones left out."""
    flags = ["--max-total-tokens", "32768"]
    through = ["setarch", "-R"] if shutil.which("setarch") else []

    def stock() -> Server:
        return servers.start_stock(
            stack, arguments.model, flags=flags, dtype=arguments.dtype, through=through
        )

    def ours() -> Server:
        if arguments.control:
            return stock()
        exchange = stack.enter_context(servers.exchange_directory())
        if arguments.model not in servers.OTHER:  # a model at a path: as an operator starts it
            return servers.serve(
                stack,
                arguments.model,
                exchange,
                ["--reuse-from", arguments.source],
                flags=[*flags, "--dtype", arguments.dtype],
                environment={"KVHUB_HOME": home, "OMP_NUM_THREADS": "1"},
                through=through,
            )
        settings = {"worth": "auto"}
        return servers.start(
            stack, arguments.model, home, exchange, settings=settings, flags=flags, through=through
        )

    makers = {"stock": stock, "kvhub": ours}
    with contextlib.ExitStack() as stack:
        pair = {name: makers[name]() for name in sorted(makers, reverse=bool(number % 2))}
        for server in pair.values():
            server.wait(servers.PATIENCE)
        found, start = {}, number * 5003
        for length in arguments.lengths:
            prompts = []
            for _ in range(arguments.warmup + arguments.requests // arguments.starts):
                # a first token of its own makes every prompt new to both servers
                prompts.append([3 + start % 4000, *ids[start % (len(ids) - length) :][: length - 1]])
                start += 17
            rows = measure(pair, prompts, arguments.pause)
            found[length] = {name: row[arguments.warmup :] for name, row in rows.items()}
    return found


def summary(length: int, starts: list[dict[int, dict[str, list[list[float]]]]]) -> dict[str, Any]:
    """Ratios of one length over all starts, and of each; milliseconds beside them."""
    times = {
        name: np.asarray([row for start in starts for row in start[length][name]])
        for name in ("kvhub", "stock")
    }
    first = [list(times[name][:, 0]) for name in ("kvhub", "stock")]
    total = [list(times[name][:, 1]) for name in ("kvhub", "stock")]
    alone = [[[row[0] for row in start[length][name]] for name in ("kvhub", "stock")] for start in starts]
    return {
        "tokens": length,
        "ttft": ratio(*first),
        "ttft_of_each_start": [ratio(*one)["ratio"] for one in alone],
        "ttft_over_starts": over_starts([ratio(*one)["ratio"] for one in alone]),
        "ttft_trimmed_5_percent": trimmed(*first),
        "whole_request": ratio(*total),
        **{
            f"{name}_ttft_ms": {
                "p50": round(float(np.median(values)), 2),
                "p95": round(float(np.quantile(values, 0.95)), 2),
            }
            for name, values in zip(("kvhub", "stock"), first, strict=True)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="large", help="small, large, or a path (then --home and --source)")
    parser.add_argument("--source", help="the model that a model at a path may map from")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--starts", type=int, default=4, help="times that both servers are started")
    parser.add_argument("--requests", type=int, default=400, help="pairs per length, over all starts")
    parser.add_argument("--warmup", type=int, default=15, help="pairs per length and start that do not count")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between requests")
    parser.add_argument("--home", help="KVHUB_HOME with a mapper (default: fit one first)")
    parser.add_argument("--control", action="store_true", help="stock against stock, to see what noise gives")
    parser.add_argument("--name", default="overhead")
    arguments = parser.parse_args()
    shipped = arguments.model in servers.OTHER
    if not (shipped or arguments.control or (arguments.home and arguments.source)):
        parser.error("a model at a path needs --source and --home, with a mapper from it")
    ids = servers.token_ids(slice(0, 400000), *([] if shipped else [arguments.model]))
    with contextlib.ExitStack() as stack:
        home = "" if arguments.control else stack.enter_context(servers.fitted_home(arguments.home))
        starts = []
        for number in range(arguments.starts):
            starts.append(run(arguments, home, ids, number))
            for length in arguments.lengths:
                print(json.dumps(summary(length, starts[-1:])), flush=True)
            path = machine.write(arguments.name, report(arguments, starts))
    print(path)


def report(
    arguments: argparse.Namespace, starts: list[dict[int, dict[str, list[list[float]]]]]
) -> dict[str, Any]:
    """What is written after each start."""
    return {
        "what": "TTFT with kvhub loaded but not asked for, over stock SGLang's; interleaved pairs",
        "model": Path(arguments.model).name,
        "dtype": arguments.dtype,
        "control": arguments.control,
        "starts": len(starts),
        "excluded": f"the first {arguments.warmup} pairs of each length and start",
        "machine": machine.describe(),
        "lengths": [summary(length, starts) for length in arguments.lengths],
        "load_average_at_the_end": os.getloadavg(),
    }


if __name__ == "__main__":
    main()
