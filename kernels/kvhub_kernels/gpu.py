"""Apply a mapper with the Triton kernels: CUDA tensors, or CPU tensors in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvhub_kernels.fused import affine_kernel, gather_kernel
from kvhub_kernels.packed import Packed, tables
from kvhub_kernels.rotary import RotaryTable
from kvhub_kernels.rows import Rows, check_call
from kvhub_kernels.tiles import Tile, choose, lanes_of
from kvhub_kernels.weights import Weights
from kvhub_kernels.workspace import Workspace

CHUNK_TOKENS = 4096
"""Tokens mapped at a time: enough tiles to fill a GPU, and content rows of at most a few hundred MB."""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_KEPT_TABLES = 64


class TritonApplier:
    """One mapper on one device. Launches on the current stream and never waits for it.

    After a first call with the same caches, layers and no more tokens, nothing is allocated and nothing is
    copied from the host, so that a call can be captured in a CUDA graph; a capture before such a call is
    refused. What a capture points to is kept as long as this object, which must live as long as the
    graph; the caller keeps the caches, pages and rotations. One stream at a time.
    """

    def __init__(
        self,
        weights: Weights,
        rotate: RotaryTable,
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.bfloat16,
        chunk: int = CHUNK_TOKENS,
    ) -> None:
        """rotate: a table of the target's rotation (any positions), which fixes how columns are paired."""
        self.plan, self.dtype, self.device = weights.plan, dtype, torch.device(device)
        self._pairing, self._half = rotate.pairing, rotate.rotary_dim // 2
        self.packed = Packed.of(
            weights,
            interleaved=rotate.pairing == "interleaved",
            rotary_dim=rotate.rotary_dim,
            dtype=dtype,
            device=self.device,
        )
        self.workspace = Workspace(self.device)
        self._chunk = chunk
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._dummy = torch.zeros(1, dtype=torch.int64, device=self.device)
        place = {layer: index for index, layer in enumerate(self.plan.used)}
        self._used = self._ints(self.plan.used)
        places = [[place[layer] for layer in chosen] for chosen in self.plan.source_layers]
        self._places = self._ints([index for chosen in places for index in chosen])
        self._packable = self.plan.k <= 32 and len(self.plan.used) <= 128
        self._words = _packed_words(places if self._packable else [[]] * len(places)).to(self.device)
        self._layers: dict[tuple[int, ...], Tensor] = {}
        self._streams: set[int] = set()
        self._captured: dict[int, Tensor] = {}
        if self.device.type == "cuda":  # made on this thread's stream, read on others
            torch.cuda.current_stream(self.device).synchronize()

    @property
    def nbytes(self) -> int:
        """Bytes of the weights on the device."""
        return self.packed.nbytes

    def apply(
        self,
        source: Rows,
        target: Rows,
        strip: RotaryTable,
        rotate: RotaryTable,
        layers: Sequence[int] | None = None,
        *,
        tile: Tile | None = None,
    ) -> Tensor:
        """See `CpuApplier.apply`; the result is a 0-dimensional int32 on the device (1: all finite),
        valid until the next call. Keys and values of a cache must have one stride (`Rows.slot_stride`).
        """
        wanted = tuple(range(self.plan.layers) if layers is None else layers)
        check_call(self.plan, source, target, strip, rotate, wanted, device=self.device)
        if rotate.pairing != self._pairing or rotate.rotary_dim != 2 * self._half:
            raise ValueError("the weights were packed for another rotation")
        self._note_stream()
        if capturing(self.device):
            self._keep_for_graph(source, target, wanted)
        if wanted not in self._layers:
            self._layers[wanted] = self._ints(wanted)
        finite = self.workspace.take("finite", (), torch.int32).fill_(1)
        for start in range(0, source.tokens, self._chunk):
            tokens = min(self._chunk, source.tokens - start)
            x = self._gather(source, strip, start, tokens)
            self._affine(x, target, rotate, self._layers[wanted], start, tokens, finite, tile)
        return finite

    def _keep_for_graph(self, source: Rows, target: Rows, wanted: tuple[int, ...]) -> None:
        """Tables and scratch that a later call may drop or replace, while a graph still points to them."""
        size = math.prod(self._scratch(source))
        tables = [self._known.get(_address_key(rows)) for rows in (source, target)]
        held = [self.workspace.held("x", self.dtype), self.workspace.held("finite", torch.int32)]
        used = [*tables, *held, self._layers.get(wanted)]
        if any(part is None for part in used) or (held[0] is not None and held[0].numel() < size):
            raise ValueError("before a capture, apply once with the same caches, layers and as many tokens")
        self._captured |= {part.data_ptr(): part for part in used if part is not None}

    def _scratch(self, source: Rows) -> tuple[int, int, int, int]:
        """Shape of the content rows of a chunk, with room for whole token tiles: the product reads, and
        throws away, rows beyond the last token.
        """
        capacity = min(self._chunk, source.tokens) + 255 & ~255
        return 2, len(self.plan.used), capacity, self.plan.source_heads * self.plan.source_dim

    def _note_stream(self) -> None:
        """Weights that are dropped while a stream still reads them are not given away before it has."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream not in self._streams:
            self._streams.add(stream.cuda_stream)
            for held in self.packed.held:
                held.record_stream(stream)

    def _gather(self, source: Rows, strip: RotaryTable, start: int, tokens: int) -> Tensor:
        plan = self.plan
        shape = self._scratch(source)
        *_, capacity, features = shape
        x = self.workspace.take("x", shape, self.dtype)
        cos, sin, factor = tables(strip, back=True)
        # The interpreter takes as long for a small program as for a large one.
        block_tokens, block_pairs = (64, 128) if self.device.type == "cpu" else (16, 64)
        grid = (
            triton.cdiv(tokens, block_tokens),
            triton.cdiv(features // 2, block_pairs),
            2 * len(plan.used),
        )
        gather_kernel[grid](
            self._addresses(source),
            self._dummy if source.slots is None else source.slots,
            cos,
            sin,
            self._used,
            x,
            start,
            tokens,
            len(plan.used),
            capacity,
            source.slot_stride,
            factor,
            ROWS=_TYPES[source.dtype],
            HEADS=plan.source_heads,
            HEAD_DIM=plan.source_dim,
            HALF=strip.rotary_dim // 2,
            INTERLEAVED=strip.pairing == "interleaved",
            PAGE=0 if source.slots is None else source.page_size,
            BLOCK_TOKENS=block_tokens,
            BLOCK_PAIRS=block_pairs,
            num_warps=4,
        )
        return x

    def _affine(
        self,
        x: Tensor,
        target: Rows,
        rotate: RotaryTable,
        layers: Tensor,
        start: int,
        tokens: int,
        finite: Tensor,
        tile: Tile | None,
    ) -> None:
        plan, packed = self.plan, self.packed
        pairs = plan.columns // 2
        device = describe(self.device)
        tile = tile or choose(
            plan.support,
            tokens,
            pairs,
            plan.width,
            capability=device.capability,
            shared=device.shared,
            itemsize=self.dtype.itemsize,
            lanes=0 if packed.norm is None else lanes_of(plan.target_dim),
        )
        # Two programs a multiprocessor hide each other's epilogue, where they fit.
        resident = 2 if 2 * tile.shared(self.dtype.itemsize) < device.shared else 1
        cos, sin, _ = tables(rotate, back=False)
        count = layers.shape[0]
        lanes = lanes_of(plan.target_dim)
        if packed.norm is None:
            column_tiles = triton.cdiv(pairs, tile.pairs)
        elif tile.pairs < lanes:
            raise ValueError(f"a tile of {tile.pairs} pairs does not hold a head of {plan.target_dim}")
        else:
            column_tiles = triton.cdiv(plan.columns // plan.target_dim, tile.pairs // lanes)
        tiles = 2 * count * plan.groups * triton.cdiv(tokens, tile.tokens) * column_tiles
        affine_kernel[(min(tiles, resident * device.processors) if tile.persistent else tiles,)](
            x,
            packed.matrix,
            packed.bias,
            packed.bias if packed.scale is None else packed.scale,
            packed.bias if packed.norm is None else packed.norm,
            cos,
            sin,
            self._places,
            self._words,
            layers,
            self._addresses(target),
            self._dummy if target.slots is None else target.slots,
            finite,
            start,
            tokens,
            count,
            x.shape[1],
            x.shape[2],
            target.slot_stride,
            POOL=_TYPES[target.dtype],
            GROUPS=plan.groups,
            K=plan.k,
            WIDTH=plan.width,
            PAIRS=pairs,
            HEAD_DIM=plan.target_dim,
            HALF=self._half,
            INTERLEAVED=self._pairing == "interleaved",
            PAGE=0 if target.slots is None else target.page_size,
            WORDS=self._packable,
            INT8=packed.scale is not None,
            NORM=packed.norm is not None,
            LANES=lanes,
            WIDE=self.device.type == "cpu",
            BLOCK_TOKENS=tile.tokens,
            BLOCK_PAIRS=tile.pairs,
            BLOCK_DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )

    def _addresses(self, rows: Rows) -> Tensor:
        """`[layers, 2]` int64 on the device; remembered, since copying it would break a capture."""
        key = _address_key(rows)
        known = self._known.get(key)
        if known is None:
            if any(address % 16 for address in key):
                raise ValueError("the layers of a cache must be aligned to 16 bytes")
            if len(self._known) >= _KEPT_TABLES:
                self._known.pop(next(iter(self._known)))
            known = self._known[key] = torch.tensor(key, dtype=torch.int64, device=self.device)
        return known

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)


def _address_key(rows: Rows) -> tuple[int, ...]:
    """Where each layer's keys and values begin."""
    return tuple(layer.data_ptr() for pair in zip(rows.keys, rows.values, strict=True) for layer in pair)


def capturing(device: torch.device) -> bool:
    """Whether the current stream's work goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _packed_words(places: Sequence[Sequence[int]]) -> Tensor:
    """`[layers, 4]` int64: entry i of each list in byte i % 8 of word i // 8."""
    packed = torch.zeros((len(places), 32), dtype=torch.uint8)
    for row, chosen in zip(packed, places, strict=True):
        row[: len(chosen)] = torch.tensor(list(chosen), dtype=torch.uint8)
    return packed.view(torch.int64)


class Device(NamedTuple):
    """What a launch must know of its device."""

    capability: int
    processors: int
    shared: int
    """Bytes of shared memory that one program may take."""

    @property
    def name(self) -> str:
        return f"sm_{self.capability}"


@lru_cache
def describe(device: torch.device) -> Device:
    """Of a CUDA device; the interpreter passes for a small one of the newest kind."""
    if device.type != "cuda":
        return Device(90, 3, 232448)
    found = torch.cuda.get_device_properties(device)
    shared = int(getattr(found, "shared_memory_per_block_optin", 101376))
    return Device(10 * found.major + found.minor, int(found.multi_processor_count), shared)
