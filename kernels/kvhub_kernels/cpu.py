"""Apply a mapper on the CPU at the speed of the plain matrix products in it.

Content rows of every source layer are made once; the selected ones are kept side by side from one
target layer to the next (`joined.py`). All heads of a layer are one product.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from kvhub_kernels.joined import Joined
from kvhub_kernels.normalise import normalise_
from kvhub_kernels.product import Product
from kvhub_kernels.rotary import RotaryTable
from kvhub_kernels.rotate import Turns, rotate_into, turns, turns_back
from kvhub_kernels.rows import Rows, check_call
from kvhub_kernels.weights import Weights
from kvhub_kernels.workspace import Workspace

CHUNK_BYTES = 48 << 20
"""Content rows of one chunk of tokens: some stay in cache, and memory does not grow with the prompt."""
_CPU = torch.device("cpu")


class CpuApplier:
    """One mapper, ready to be applied; buffers are kept between calls. Safe to share between threads.

    dtype: float32, or bfloat16: then content rows and weights are rounded to it before the product,
    sums stay float32 inside the product, the bias in them, and are rounded once before the rotation.
    """

    def __init__(
        self, weights: Weights, dtype: torch.dtype = torch.float32, *, chunk: int | None = None
    ) -> None:
        """chunk: tokens mapped at a time (None: by `CHUNK_BYTES`)."""
        self.plan, self.dtype = weights.plan, dtype
        self._product = Product(weights, dtype)
        self._norms = weights.norms
        self.workspace = Workspace()
        self._chunk = chunk
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights, which may be the caller's own."""
        return self._product.nbytes + (0 if self._norms is None else self._norms.nbytes)

    @torch.no_grad()
    def apply(
        self,
        source: Rows,
        target: Rows,
        strip: RotaryTable,
        rotate: RotaryTable,
        layers: Sequence[int] | None = None,
    ) -> Tensor:
        """Write the target's rows of `layers` (None: all), keys rotated, into `target`.

        strip, rotate: the source's and the target's rotation at the rows' positions; their tables
        have a row for each token. Layer t is written to `target.keys[t]` and `target.values[t]`.
        Returns whether every mapped value is finite, a 0-dimensional bool.
        """
        wanted = tuple(range(self.plan.layers) if layers is None else layers)
        check_call(self.plan, source, target, strip, rotate, wanted, device=_CPU)
        if not wanted:
            return torch.ones((), dtype=torch.bool)
        used = sorted({layer for t in wanted for layer in self.plan.source_layers[t]})
        read, written = source.token_slots(), target.token_slots()
        turn = turns(rotate)
        poison = torch.zeros(())
        with self._lock:
            undo = turns_back(strip, self.workspace)
            step = self._chunk or self._tokens_at_a_time(len(used))
            for start in range(0, source.tokens, step):
                span = slice(start, min(start + step, source.tokens))
                for side, rotated in (("k", True), ("v", False)):
                    content = self._contents(
                        source, side, used, span, read, undo.at(span) if rotated else None
                    )
                    joined = self._joined(span.stop - span.start)
                    for t in wanted:
                        rows = self._product(t, side, joined.of(t, content), self.workspace)
                        if rotated:
                            rows = self._rotated(rows, turn.at(span), t)
                        pool = (target.keys if rotated else target.values)[t]
                        poison += self._write(pool, written, rows, span) * 0
        finite = torch.isfinite(poison)
        if not finite:  # or large values whose sum has overflowed
            finite = torch.tensor(all(_finite(target, layer, written, source.tokens) for layer in wanted))
        return finite

    def _tokens_at_a_time(self, used: int) -> int:
        row = used * self.plan.width * self.plan.groups * self.dtype.itemsize
        return max(256, min(4096, CHUNK_BYTES // row // 64 * 64))

    def _joined(self, tokens: int) -> Joined:
        shape = (self.plan.groups, tokens, self._product.width)
        return Joined(self.plan, self._product.order, self.workspace.take("joined", shape, self.dtype))

    def _contents(
        self, source: Rows, side: str, used: list[int], span: slice, slots: Tensor | None, undo: Turns | None
    ) -> dict[int, Tensor]:
        """`[groups, tokens, width]` of every used layer, RoPE removed from keys."""
        plan, tokens = self.plan, span.stop - span.start
        x = self.workspace.take("x", (len(used), plan.groups, tokens, plan.width), self.dtype)
        shape = (tokens, source.heads, source.dim)
        for part, layer in zip(x, used, strict=True):
            place = part[0].view(shape) if plan.support == "full" else part.transpose(0, 1)
            rows = self._read((source.keys if side == "k" else source.values)[layer], slots, span)
            if undo is None:
                place.copy_(rows)
                continue
            rows = self._precise(rows)
            if self.dtype == torch.float32:
                rotate_into(place, rows, undo)
            else:
                out = self.workspace.take("stripped", shape, torch.float32)
                place.copy_(rotate_into(out, rows, undo))
        return dict(zip(used, x, strict=True))

    def _read(self, layer: Tensor, slots: Tensor | None, span: slice) -> Tensor:
        if slots is None:
            return layer[span]
        out = self.workspace.take("gathered", (span.stop - span.start, *layer.shape[1:]), layer.dtype)
        pool, rows = _words(layer, out)
        torch.index_select(pool, 0, slots[span], out=rows)
        return out

    def _precise(self, rows: Tensor) -> Tensor:
        if rows.dtype == torch.float32:
            return rows
        return self.workspace.take("precise", rows.shape, torch.float32).copy_(rows)

    def _rotated(self, rows: Tensor, turn: Turns, target_layer: int) -> Tensor:
        """Content keys as they are cached; `rows` may be overwritten."""
        precise = self._precise(rows)
        if self._norms is not None:
            precise = normalise_(precise, self._norms[target_layer], self.workspace)
        out = self.workspace.take("rotated", rows.shape, torch.float32)
        return rotate_into(out, precise, turn)

    def _write(self, layer: Tensor, slots: Tensor | None, rows: Tensor, span: slice) -> Tensor:
        """Scatter `rows` `[tokens, heads, dim]`; returns the sum of what was stored."""
        if slots is None:
            layer[span].copy_(rows)
            stored = layer[span]
        else:
            stored = rows
            if layer.dtype != rows.dtype or not rows.is_contiguous():
                stored = self.workspace.take("stored", rows.shape, layer.dtype).copy_(rows)
            pool, new = _words(layer, stored)
            pool.index_copy_(0, slots[span], new)
        # What was too large for the pool shows only once stored: float16 is narrow, bfloat16 rounds what is
        # near its end up to infinity. A sum is rounded to float16 too, so that one is made in float32.
        return stored.sum(dtype=torch.float32 if layer.dtype == torch.float16 else None)


def _finite(target: Rows, layer: int, slots: Tensor | None, tokens: int) -> bool:
    pools = (target.keys[layer], target.values[layer])
    return all(
        bool((pool[:tokens] if slots is None else pool[slots[:tokens]]).isfinite().all()) for pool in pools
    )


def _words(*both: Tensor) -> Sequence[Tensor]:
    """The same bytes as words of 16, where both can be: rows are copied three times as fast as element by
    element.
    """
    return [rows.view(torch.complex128) for rows in both] if all(map(_whole, both)) else both


def _whole(rows: Tensor) -> bool:
    word = 16 // rows.element_size()
    aligned = rows.data_ptr() % 16 == 0 and rows.storage_offset() % word == 0
    return aligned and rows.shape[-1] % word == 0 and rows.stride(0) % word == 0
