"""One script for one GPU: check, time, write. Needs kvhub_kernels, torch and triton >= 3.6 and nothing else.

    PYTHONPATH=.:kernels python -m benchmarks.gpu_apply [--out FOLDER] [--seconds 420] [--tune]

In order of what matters most if time runs out: shapes against the definition, by several processes
(`gpu_checks.py` says which); the dispatch floor, eager and from a CUDA graph; Qwen3 14B->32B at 32,768 tokens
in both supports and int8; then the other pairs and lengths. Ceilings (a large bfloat16 product, a large copy)
are measured in the same run. A wrong result is reported and never timed, that of a candidate tile and of a
graph's replay too. `--tune` prints the time of every candidate tile and the table's line of the fastest.
Exit code 1 where anything was wrong or failed, 2 without a GPU. Writes `apply_gpu.csv`,
`apply_gpu_checks.csv` and `apply_gpu.json`, which says how many of the shapes were checked.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu_checks import TOLERANCE, checks, error_of, poisoned, shapes
from benchmarks.shapes import PAIRS, eager, make_plan, make_rows, make_table, make_weights, per_head
from kvhub_kernels.arriving import Arriving, CudaLane, apply_arriving
from kvhub_kernels.gpu import CHUNK_TOKENS, TritonApplier, describe
from kvhub_kernels.rotary import RotaryTable
from kvhub_kernels.rows import Rows
from kvhub_kernels.tiles import CANDIDATES
from kvhub_kernels.weights import Weights

DEVICE = "cuda"
MAIN = "Qwen3 14B->32B"


class Clock:
    """What is left of the time that the machine is lent for."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def has(self, seconds: float) -> bool:
        return time.monotonic() + seconds < self._end


def timed(what: Callable[[], Any], rounds: int = 10) -> float:
    """Median milliseconds by events, after two rounds that warm up."""
    for _ in range(2):
        what()
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)
    ]
    for begin, end in marks:
        begin.record()
        what()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in marks)[rounds // 2]


def ceilings() -> dict[str, float]:
    """TFLOP/s of an 8192^3 bfloat16 product and GB/s of a 4 GiB copy, read and written."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in "ab")
    product = timed(lambda: a @ b)
    big = torch.empty(2 << 30, dtype=torch.uint8, device=DEVICE).random_(0, 255)
    other = torch.empty_like(big)
    copy = timed(lambda: other.copy_(big))
    return {"tflops": 2 * 8192**3 / product / 1e9, "gbytes_per_second": 2 * big.nbytes / copy / 1e6}


def arriving(tokens: int = 8192) -> dict[str, Any]:
    """Blocks of 64 tokens in host memory, mapped as they land, beside one copy of all and then the map."""
    pair, dtype = PAIRS[MAIN], torch.bfloat16
    plan = make_plan(pair, "head-local")
    layers, heads, dim = pair.source
    blocks = [torch.randn(layers, 2, 64, heads, dim).to(dtype) for _ in range(tokens // 64)]
    target = poisoned(plan.layers, *pair.target[1:], tokens, dtype, 1, DEVICE)
    strip, rotate = make_table(pair.source[2], tokens, DEVICE), make_table(pair.target[2], tokens, DEVICE)
    applier = TritonApplier(make_weights(plan, dtype, DEVICE), rotate, device=DEVICE, dtype=dtype)
    lane = CudaLane(torch.device(DEVICE))

    def landing() -> torch.Tensor:
        return apply_arriving(applier, Arriving(blocks), target, strip, rotate, lane)

    def at_once() -> torch.Tensor:
        rows = torch.cat(blocks, dim=2).to(DEVICE)
        source = Rows(list(rows[:, 0].unbind(0)), list(rows[:, 1].unbind(0)), tokens)
        return applier.apply(source, target, strip, rotate)

    good = bool(landing())
    kept = [layer.clone() for layer in (*target.keys, *target.values)]
    good &= bool(at_once())
    same = all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        for a, b in zip(kept, (*target.keys, *target.values), strict=True)
    )
    if not (good and same):
        return {"tokens": tokens, "equal": False}
    return {
        "tokens": tokens,
        "equal": True,
        "landing_milliseconds": round(timed(landing, 5), 2),
        "at_once_milliseconds": round(timed(at_once, 5), 2),
    }


PART = 256


def parts(tokens: int) -> list[int]:
    """Where the rows that are compared begin: a prompt's ends, the ends of two chunks, and between."""
    chunk = CHUNK_TOKENS - PART // 2
    return sorted({0, chunk, tokens // 2 + chunk, tokens // 3 // PART * PART, tokens - PART})


def error_of_part(
    weights: Weights,
    dtype: torch.dtype,
    source: Rows,
    target: Rows,
    strip: RotaryTable,
    rotate: RotaryTable,
    layers: list[int],
    start: int,
) -> float:
    """`error_of` of the rows `start ... start + PART`."""
    stop = start + PART
    few = [
        Rows(rows.keys, rows.values, PART, slots[start:stop])
        for rows in (source, target)
        if (slots := rows.token_slots()) is not None
    ]
    turns = [RotaryTable(t.cos[start:stop], t.sin[start:stop], t.pairing, t.scale) for t in (strip, rotate)]
    return error_of(weights, dtype, few[0], few[1], turns[0], turns[1], layers)


def sample(target: Rows) -> list[torch.Tensor]:
    """What was written of the first and the last layer."""
    slots = target.token_slots()
    layers = (target.keys[0], target.values[0], target.keys[-1], target.values[-1])
    return [layer[: target.tokens].clone() if slots is None else layer[slots] for layer in layers]


def off(target: Rows, first: list[torch.Tensor]) -> float:
    """The largest relative difference of `sample` now; 0 only where every bit is the same."""
    pairs = list(zip(sample(target), first, strict=True))
    if all(map(torch.equal, *zip(*pairs, strict=True))):
        return 0.0
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def measure(
    name: str, support: Any, tokens: int, top: dict[str, float], *, int8: bool, tune: bool
) -> dict[str, Any]:
    """One mapper at one length: eager calls, a graph's replays, the plain products, the eager loop."""
    pair, dtype = PAIRS[name], torch.bfloat16
    plan = make_plan(pair, support)
    dense = make_weights(plan, dtype, DEVICE)
    weights = dense.quantized() if int8 else dense
    source = make_rows(pair.source[0], *pair.source[1:], tokens, dtype, DEVICE, page=64)
    target = poisoned(plan.layers, *pair.target[1:], tokens, dtype, 64, DEVICE)
    strip, rotate = make_table(pair.source[2], tokens, DEVICE), make_table(pair.target[2], tokens, DEVICE)
    applier = TritonApplier(weights, rotate, device=DEVICE, dtype=dtype)

    def ours() -> None:
        applier.apply(source, target, strip, rotate)

    best = None
    ours()
    first = sample(target)
    if tune:
        times = {}
        for tile in CANDIDATES:
            try:
                applier.apply(source, target, strip, rotate, tile=tile)
                if off(target, first) > TOLERANCE[dtype]:
                    print(f"WRONG {tile}", flush=True)
                    continue
                times[tile] = timed(lambda: applier.apply(source, target, strip, rotate, tile=tile), 5)  # noqa: B023
            except Exception as failure:  # too much shared memory on this GPU
                print(f"{tile}: {str(failure)[:120]}", flush=True)
        for tile, milliseconds in sorted(times.items(), key=lambda item: item[1]):
            print(f"  {support} {tokens}: {milliseconds:8.2f} ms {tile}", flush=True)
        best = min(times, key=times.__getitem__)
        known = 90 if describe(torch.device(DEVICE)).capability >= 90 else 80
        print(f'  for TABLE in tiles.py: ({known}, "{support}", ANY): {best},', flush=True)
    ours()
    error = (
        error_of(weights, dtype, source, target, strip, rotate, [0, plan.layers - 1])
        if tokens <= 8192
        else None
    )
    if error is None:  # the definition in float64 for a part of the rows: they do not see each other
        error = max(
            error_of_part(weights, dtype, source, target, strip, rotate, [0, plan.layers - 1], start)
            for start in parts(tokens)
        )
    assert error < TOLERANCE[dtype], f"{name} {support} {tokens}: off by {error:.1e}"
    milliseconds = timed(ours)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours()
    for layer in (*target.keys, *target.values):
        layer.fill_(float("nan"))
    graph.replay()
    assert off(target, first) == 0, f"{name} {support} {tokens}: a graph's replay gives other rows"
    replay = timed(graph.replay)
    x = torch.randn(plan.groups, tokens, plan.depth, device=DEVICE, dtype=dtype)
    out = torch.empty(plan.groups, tokens, plan.columns, device=DEVICE, dtype=dtype)
    matmul = timed(lambda: [torch.bmm(x, affine.weight, out=out) for affine in dense], 3)
    heads = per_head(dense, dtype)
    loop = timed(lambda: eager(dense, heads, source, target, strip, rotate), 3)
    flops = plan.flops(tokens)
    features = (
        len(plan.used) * plan.source_heads * plan.source_dim
        + plan.layers * plan.target_heads * plan.target_dim
    )
    moved = weights.nbytes + 2 * 2 * tokens * features
    return {
        "device": torch.cuda.get_device_name(), "pair": name, "support": support,
        "tokens": tokens, "k": plan.k,
        "weights": "int8" if int8 else "bfloat16", "milliseconds": round(milliseconds, 3),
        "graph_milliseconds": round(replay, 3), "matmul_milliseconds": round(matmul, 3),
        "fraction_of_matmul": round(matmul / replay, 3), "eager_milliseconds": round(loop, 3),
        "times_eager": round(loop / milliseconds, 2), "tflops": round(flops / replay / 1e9, 1),
        "fraction_of_tflops": round(flops / replay / 1e9 / top["tflops"], 3),
        "gbytes_per_second": round(moved / replay / 1e6, 1),
        "fraction_of_bandwidth": round(moved / replay / 1e6 / top["gbytes_per_second"], 3),
        "relative_error": f"{error:.1e}", "best_tile": str(best or ""),
    }  # fmt: skip


def save(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    with (folder / name).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument(
        "--tune", action="store_true", help="try every candidate tile at 14B->32B, 32,768 tokens"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "gpu_apply: torch sees no GPU here\n")
    failed = False
    options.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(options.seconds)
    torch.manual_seed(0)
    top = ceilings()
    about: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **top,
    }
    print(about, flush=True)
    rows: list[dict[str, Any]] = []
    plan_of_work = [
        (MAIN, support, tokens, False) for tokens in (64, 32768) for support in ("full", "head-local")
    ]
    plan_of_work += [(MAIN, support, 32768, True) for support in ("full", "head-local")]
    limit = Clock(min(180, options.seconds / 2))
    checked = checks(lambda: limit.has(0))
    bad = sum(not row["good"] for row in checked)
    about |= {"checked": len(checked), "shapes": len(shapes()), "wrong": bad}
    print(f"{len(checked)} of {len(shapes())} shapes checked, {bad} wrong", flush=True)
    if checked:
        save(options.out, "apply_gpu_checks.csv", checked)
    try:
        about["arriving"] = arriving()
    except Exception as failure:
        about["arriving"] = {"equal": False, "failure": str(failure)[:300]}
    print(about["arriving"], flush=True)
    for name, support, tokens in itertools.product(PAIRS, ("full", "head-local"), (8192, 32768, 1024)):
        if (name, support, tokens, False) not in plan_of_work:
            plan_of_work.append((name, support, tokens, False))
    for name, support, tokens, int8 in plan_of_work:
        if not clock.has(15):
            print("out of time", flush=True)
            break
        try:
            tune = options.tune and name == MAIN and tokens == 32768 and not int8
            rows.append(measure(name, support, tokens, top, int8=int8, tune=tune))
        except Exception as failure:
            failed = True
            print(f"FAILED {name} {support} {tokens}: {str(failure)[:400]}", flush=True)
            torch.cuda.empty_cache()
            continue
        shown = (
            "pair",
            "support",
            "tokens",
            "weights",
            "graph_milliseconds",
            "fraction_of_matmul",
            "tflops",
            "times_eager",
        )
        print(" ".join(f"{key} {rows[-1][key]}" for key in shown), flush=True)
        save(options.out, "apply_gpu.csv", rows)
        torch.cuda.empty_cache()
    (options.out / "apply_gpu.json").write_text(json.dumps(about | {"rows": len(rows)}, indent=1) + "\n")
    if failed or bad or not checked or not rows or not about["arriving"]["equal"]:
        parser.exit(1)


if __name__ == "__main__":
    main()
