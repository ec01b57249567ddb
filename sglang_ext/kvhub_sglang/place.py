"""Fill private slots: exact rows copied, own blocks written, source blocks mapped.

All of it happens before the forward is launched, so that a failure costs the
request nothing but its prefill. On a GPU it is ordered on the forward stream.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvhub.exchange import BLOCK_TOKENS, EXACT, Block, Lineage
from kvhub_kernels.rows import Rows
from kvhub_sglang.lineage import RowLineages
from kvhub_sglang.plan import BlockSource, Plan
from kvhub_sglang.refusal import Code, Refusal
from kvhub_sglang.serving import Candidate, Serving


class Pool:
    """The rows of SGLang's `MHATokenToKVPool`: `[slots, num_kv_heads, head_dim]` per layer."""

    def __init__(self, kvcache: Any) -> None:
        self.keys: list[Tensor] = kvcache.k_buffer
        self.values: list[Tensor] = kvcache.v_buffer

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def size(self) -> int:
        """Slots, the padding page included."""
        return int(self.keys[0].shape[0])

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy rows from `source` slots to `target` slots in every layer."""
        for buffer in (*self.keys, *self.values):
            buffer.index_copy_(0, target, buffer[source])

    def write(self, layer: int, target: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write rows `[tokens, num_kv_heads, head_dim]` of one layer, rounded to the pool's dtype."""
        for buffer, rows in ((self.keys[layer], keys), (self.values[layer], values)):
            buffer.index_copy_(0, target, rows.to(buffer.dtype))

    def read(self, slots: Tensor) -> Tensor:
        """Rows of every layer: `[num_layers, 2, tokens, num_kv_heads, head_dim]`."""
        return torch.stack(
            [torch.stack((k[slots], v[slots])) for k, v in zip(self.keys, self.values, strict=True)]
        )


@dataclass(frozen=True)
class _Run:
    """Consecutive blocks from one source, `[start, stop)` in tokens."""

    candidate: Candidate | None
    first_block: int
    blocks: list[Block]
    start: int
    stop: int
    sources: list[BlockSource]

    def lineages(self) -> Iterator[tuple[Lineage, range]]:
        """Lineage of the rows of each block, and the tokens wanted of it."""
        for number, source in enumerate(self.sources, self.first_block):
            first, last = number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS
            yield source.lineage, range(max(first, self.start), min(last, self.stop))

    @property
    def pieces(self) -> list[Tensor]:
        """What is wanted of each payload, `[num_layers, 2, tokens, heads, head_dim]`; nothing is copied."""
        cut = []
        for number, block in enumerate(self.blocks, self.first_block):
            origin = number * BLOCK_TOKENS
            cut.append(block.payload[:, :, max(0, self.start - origin) : self.stop - origin])
        return cut


def staged_runs(serving: Serving, plan: Plan, start: int, stop: int) -> list[_Run]:
    """The staged blocks of `[start, stop)`; `Refusal` if they were given up or may not be used any more."""
    blocks = plan.stage.blocks() if plan.stage is not None else None
    if blocks is None:
        raise Refusal(Code.SLOW, "the blocks were staged too long ago")
    runs: list[_Run] = []
    for index in range(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)):
        source = plan.blocks[index]
        if source.candidate is not None and source.candidate not in serving.candidates:
            raise Refusal(Code.WITHDRAWN, "the mapper was withdrawn")
        block = blocks[index]
        lo, hi = max(start, index * BLOCK_TOKENS), min(stop, (index + 1) * BLOCK_TOKENS)
        if runs and runs[-1].candidate is source.candidate:
            last = runs[-1]
            last.blocks.append(block)
            last.sources.append(source)
            runs[-1] = replace(last, stop=hi)
        else:
            runs.append(_Run(source.candidate, index, [block], lo, hi, [source]))
    return runs


def place(serving: Serving, pool: Pool, runs: list[_Run], slots: Tensor, base: int, *, copy: Tensor) -> None:
    """Write into `slots` (slot i holds token base + i), every layer: `copy`, then the rows of `runs`.

    copy: slots of the exact rows to copy, for the first tokens.
    `Refusal(NOT_FINITE)` if a mapped row is not finite, `Refusal(CAPACITY)` if a mapper went for another
    since the request prepared it: it is not built here. The slots are then worthless.
    """
    with forward_order(serving):
        if len(copy):
            pool.copy(copy, slots[: len(copy)])
        for run in runs:
            target = slots[run.start - base : run.stop - base]
            if run.candidate is None:
                rows = torch.cat(run.pieces, dim=2).to(pool.device)
                for layer in range(len(pool.keys)):
                    pool.write(layer, target, rows[layer, 0], rows[layer, 1])
            else:
                started = time.perf_counter()
                _map(run, run.candidate, pool, target)
                milliseconds = (time.perf_counter() - started) * 1e3
                serving.cost.observe_map(run.candidate.digest, run.stop - run.start, milliseconds)


def replace_by_exact(serving: Serving, pool: Pool, rows: RowLineages, held: Tensor, exact: Tensor) -> int:
    """Copy exact rows over lossy ones of the same tokens, in place; how many.

    held: slots in the lossy namespace; exact: slots of as many first tokens or fewer in the
    exact one. What was computed on the old rows keeps its lineage.
    """
    held = held[: len(exact)]
    stale = ~rows.exact(held).to(held.device)
    if bool(stale.any()):
        with forward_order(serving):
            pool.copy(exact[: len(held)][stale], held[stale])
        rows.note(held[stale], EXACT)
    return int(stale.sum())


def _map(run: _Run, candidate: Candidate, pool: Pool, target: Tensor) -> None:
    ready = candidate.mapper.hold(pool.device, pool.keys[0].dtype)
    if ready is None:  # building it would keep every running request waiting
        raise Refusal(Code.CAPACITY, "the mapper went for another before its rows were mapped: --mapper-gib")
    positions = torch.arange(run.start, run.stop, device=pool.device)
    written = Rows(pool.keys, pool.values, len(positions), target)
    if not bool(candidate.mapper.map_blocks(run.pieces, positions, written)):
        raise Refusal(Code.NOT_FINITE, "the mapped cache has NaN or infinity")


@contextlib.contextmanager
def forward_order(serving: Serving) -> Iterator[None]:
    """Run in the order of the forward stream, so that reused slots are safe (CUDA)."""
    if serving.stream is None:
        yield
    else:
        # slots and indices were made on the scheduler's stream
        serving.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(serving.stream):  # type: ignore[arg-type]
            yield
