"""Applying a mapper on the CPU, beside the plain matrix products in it, the eager loop over heads, the
target's own forward (`forward.py`) and two ceilings of the same run: a large product and a large copy.

    python -m benchmarks.apply [--threads 1 --rounds 5 --pairs all|small]

The three take turns in every round, so that a busy machine slows all of them alike. With one thread the time
is CPU seconds. Every result is first held against the definition. Of the paper's pairs four target layers are
mapped (their weights take gigabytes); the small pair is mapped whole.
Writes `benchmarks/results/apply_cpu.csv`, or `apply_cpu_small.csv` for the small pair alone.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.forward import forward_seconds
from benchmarks.machine import RESULTS, describe, write_csv
from benchmarks.shapes import PAIRS, eager, make_plan, make_rows, make_table, make_weights, per_head
from kvhub_kernels.cpu import CpuApplier
from kvhub_kernels.reference import map_layer_reference

SMALL = next(iter(PAIRS))
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


def fastest(ways: Sequence[Callable[[], Any]], rounds: int, clock: Callable[[], float]) -> list[float]:
    """Least seconds of each; every round runs all of them in turn."""
    best = [float("inf")] * len(ways)
    for turn in range(rounds + 1):
        for index, way in enumerate(ways):
            began = clock()
            way()
            if turn:  # the first round warms up
                best[index] = min(best[index], clock() - began)
    return best


def ceilings(
    clock: Callable[[], float], dtypes: Sequence[torch.dtype] = tuple(TOLERANCE)
) -> dict[torch.dtype | str, float]:
    """GFLOP/s of a 2048^3 product by dtype, and GB/s (read and written) of a copy of 256 MB."""
    found: dict[torch.dtype | str, float] = {}
    for dtype in dtypes:
        a, b = (torch.randn(2048, 2048).to(dtype) for _ in "ab")
        out = torch.empty_like(a)
        (best,) = fastest([lambda: torch.mm(a, b, out=out)], 3, clock)  # noqa: B023
        found[dtype] = 2 * 2048**3 / best / 1e9
    whole = torch.zeros(64 << 20)
    other = torch.empty_like(whole)
    (best,) = fastest([lambda: other.copy_(whole)], 3, clock)
    found["copy"] = 2 * whole.nbytes / best / 1e9
    return found


def measure(
    name: str,
    support: Any,
    dtype: torch.dtype,
    tokens: int,
    rounds: int,
    top: dict[torch.dtype | str, float],
    layer_seconds: float,
) -> dict[str, Any]:
    """One row of the table."""
    pair = PAIRS[name]
    plan = make_plan(pair, support, None if name == SMALL else 4)
    weights = make_weights(plan, dtype)
    source = make_rows(pair.source[0], *pair.source[1:], tokens, dtype)
    target = make_rows(plan.layers, *pair.target[1:], tokens, dtype)
    strip, rotate = make_table(pair.source[2], tokens), make_table(pair.target[2], tokens)
    applier = CpuApplier(weights, dtype)
    heads = per_head(weights, dtype)

    error = 0.0
    applier.apply(source, target, strip, rotate)
    slots = target.token_slots()
    found = target.keys[0][slots], target.values[0][slots]
    for have, want in zip(
        found, map_layer_reference(weights, 0, source, strip, rotate, rounded=dtype), strict=True
    ):
        error = max(error, float((have.double() - want).norm() / want.norm()))
    assert error < TOLERANCE[dtype], (
        f"{name}, {support}, {dtype}: off by {error:.1e}; no times of wrong results"
    )

    x = torch.randn(plan.groups, tokens, plan.depth).to(dtype)
    out = torch.empty(plan.groups, tokens, plan.columns, dtype=dtype)

    def plain() -> None:
        for affine in weights:
            torch.bmm(x, affine.weight, out=out)

    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    ours, matmul, loop = fastest(
        (
            lambda: applier.apply(source, target, strip, rotate),
            plain,
            lambda: eager(weights, heads, source, target, strip, rotate),
        ),
        rounds,
        clock,
    )
    moved = weights.nbytes + 2 * tokens * (
        len(plan.used) * plan.source_heads * plan.source_dim * dtype.itemsize
        + plan.layers * plan.target_heads * plan.target_dim * dtype.itemsize
    )
    return {
        "device": describe()["cpu"],
        "threads": torch.get_num_threads(),
        "pair": name,
        "support": support,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens,
        "k": plan.k,
        "target_layers": plan.layers,
        "milliseconds": round(1e3 * ours, 2),
        "gflops": round(plan.flops(tokens) / ours / 1e9, 1),
        "gbytes_per_second": round(moved / ours / 1e9, 2),
        "matmul_milliseconds": round(1e3 * matmul, 2),
        "matmul_gflops": round(plan.flops(tokens) / matmul / 1e9, 1),
        "fraction_of_matmul": round(matmul / ours, 3),
        "eager_milliseconds": round(1e3 * loop, 2),
        "times_eager": round(loop / ours, 2),
        "forward_milliseconds": round(1e3 * layer_seconds * plan.layers, 1),
        "forward_over_ours": round(layer_seconds * plan.layers / ours, 2),
        "ceiling_gflops": round(top[dtype], 1),
        "ceiling_gbytes_per_second": round(top["copy"], 2),
        "relative_error": f"{error:.1e}",
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", choices=("all", "small"), default="all")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cases = [
        (name, support, dtype, tokens)
        for name in PAIRS
        for support, dtype in itertools.product(("full", "head-local"), (torch.float32, torch.bfloat16))
        for tokens in ((64, 512, 2048) if name == SMALL else (512,))
        if name == SMALL or options.pairs == "all"
    ]
    rows: list[dict[str, Any]] = []
    clock = time.process_time if options.threads == 1 else time.perf_counter
    top = ceilings(clock)
    layers: dict[tuple[str, torch.dtype, int], float] = {}
    file = RESULTS / ("apply_cpu.csv" if options.pairs == "all" else "apply_cpu_small.csv")
    for name, support, dtype, tokens in cases:
        key = name, dtype, tokens
        if key not in layers:
            layers[key] = forward_seconds(name, tokens, dtype, clock)
        with torch.no_grad():
            rows.append(measure(name, support, dtype, tokens, options.rounds, top, layers[key]))
        print(
            ", ".join(f"{key} {value}" for key, value in rows[-1].items() if key not in ("device", "k")),
            flush=True,
        )
        write_csv(file, rows)  # what was measured stays if a later one fails


if __name__ == "__main__":
    main()
