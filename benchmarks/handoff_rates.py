"""What a handoff's map reaches, beside ceilings, the eager loop over heads and the target's prefill."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.apply import ceilings, fastest
from benchmarks.shapes import eager, make_rows, make_table, per_head
from kvhub.mapper.ridge import RidgeMapper


def top_of(mapper: RidgeMapper) -> dict[str, float]:
    """GFLOP/s of a plain product in the dtype that the mapper computes in on a CPU, GB/s of a copy."""
    found = ceilings(time.process_time, (mapper.dtype,))
    return {"gflops": found[mapper.dtype], "gbytes_per_second": found["copy"]}


def rates(
    mapper: RidgeMapper, tokens: int, handoff_ms: float, prefill_ms: float, top: dict[str, float]
) -> dict[str, Any]:
    """`tokens` mapped rows in `handoff_ms` of the scheduler's thread (decide, map, place, check).

    GB: weights once, the source's rows in, the target's out. The eager loop maps as many random rows of the
    caches' dtype here, in CPU seconds of one thread; where the mapper normalises keys, without that.
    """
    weights, dtype = mapper.weights(), mapper.dtype
    plan, cached = weights.plan, getattr(torch, mapper.manifest.target.dtype)
    flops = plan.flops(tokens)
    features = len(plan.used) * plan.source_heads * plan.source_dim
    features += plan.layers * plan.target_heads * plan.target_dim
    moved = weights.nbytes + 2 * tokens * features * cached.itemsize
    source = make_rows(plan.used[-1] + 1, plan.source_heads, plan.source_dim, tokens, cached)
    target = make_rows(plan.layers, plan.target_heads, plan.target_dim, tokens, cached)
    strip, rotate = make_table(plan.source_dim, tokens), make_table(plan.target_dim, tokens)
    heads = per_head(weights, dtype)
    with torch.no_grad():
        (loop,) = fastest(
            [lambda: eager(weights, heads, source, target, strip, rotate)], 2, time.process_time
        )
    gflops, gbytes = flops / handoff_ms / 1e6, moved / handoff_ms / 1e6
    return {
        "handoff_ms": round(handoff_ms, 2),
        "gflops": round(gflops, 1),
        "gbytes_per_second": round(gbytes, 2),
        "fraction_of_ceiling": round(gflops / top["gflops"], 3),
        "fraction_of_copy": round(gbytes / top["gbytes_per_second"], 3),
        "eager_ms": round(1e3 * loop, 2),
        "eager_over_handoff": round(1e3 * loop / handoff_ms, 2),
        "prefill_over_handoff": round(prefill_ms / handoff_ms, 2),
        "ceiling_gflops": round(top["gflops"], 1),
        "ceiling_gbytes_per_second": round(top["gbytes_per_second"], 2),
        "products": str(dtype).removeprefix("torch."),
    }
