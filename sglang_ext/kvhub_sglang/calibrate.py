"""Time each mapper once at start, on rows that nobody uses, so that the first decision can be weighed."""

from __future__ import annotations

import time

import torch

from kvhub.mapper import SourceRows
from kvhub.serving.cost import CostModel
from kvhub_kernels.rows import Rows
from kvhub_sglang.place import Pool
from kvhub_sglang.serving import Candidate

_LENGTHS = (64, 64, 256)
"""The first is a warm-up and not counted."""


def calibrate(cost: CostModel, candidate: Candidate, pool: Pool) -> None:
    """Measure one mapper, unless its cost is known from an earlier start."""
    if cost.map_ms(candidate.digest, _LENGTHS[0]) is not None:
        return
    for number, tokens in enumerate(_LENGTHS):
        milliseconds = _time(candidate, pool, tokens)
        if number:
            cost.observe_map(candidate.digest, tokens, milliseconds)


def _time(candidate: Candidate, pool: Pool, tokens: int) -> float:
    device, geometry = pool.device, candidate.source.geometry
    shape = (tokens, geometry.num_kv_heads, geometry.head_dim)
    dtype = getattr(torch, candidate.source.dtype)
    rows = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(geometry.num_layers)]
    positions = torch.arange(tokens, device=device)
    source = SourceRows(rows, rows, positions, candidate.source.rope)
    scratch = [torch.empty((tokens, *k.shape[1:]), dtype=k.dtype, device=device) for k in pool.keys]
    written = Rows(scratch, [torch.empty_like(k) for k in scratch], tokens, positions)
    started = time.perf_counter()
    bool(candidate.mapper.map_rows(source, written))  # reading the verdict waits for the device
    return (time.perf_counter() - started) * 1e3
