"""Source rows that arrive from host memory in pieces, mapped as they land.

On CUDA the next piece is copied on a stream of its own while the last one is mapped, and everything is
ordered on the stream that the caller works on: what that stream does later meets finished rows, and what
it did before is done with the slots. Two buffers take turns, so nothing is allocated after the first call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvhub_kernels.apply import Applier
from kvhub_kernels.rotary import RotaryTable
from kvhub_kernels.rows import Rows

GROUP_TOKENS = 1024
"""Tokens copied and mapped at a time: enough to fill a GPU or a core's products, few enough to overlap."""
SLOTS = 2


class Lane(Protocol):
    """Brings one group of pieces to the device, in one of two buffers."""

    def send(self, slot: int, pieces: Sequence[Tensor]) -> Tensor:
        """Begin to copy `pieces`, joined over tokens, into buffer `slot`; `[layers, 2, tokens, ...]`."""
        ...

    def landed(self, slot: int) -> None:
        """Order what the caller does next after the copy into `slot`."""
        ...

    def read(self, slot: int) -> None:
        """What was done so far is all that reads `slot`; it may be overwritten after that."""
        ...


class HostLane:
    """On the CPU there is nothing to overlap with: pieces are joined, or taken as they are."""

    def __init__(self) -> None:
        self._held = torch.empty(0)

    def send(self, slot: int, pieces: Sequence[Tensor]) -> Tensor:
        if len(pieces) == 1:
            return pieces[0]
        shape = _joined(pieces)
        self._held = _room(self._held, shape, pieces[0])
        return torch.cat(list(pieces), dim=2, out=_view(self._held, shape))

    def landed(self, slot: int) -> None:
        return

    def read(self, slot: int) -> None:
        return


class CudaLane:
    """Pinned memory and a stream for copies. One caller at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned = [torch.empty(0) for _ in range(SLOTS)]
        self._buffers = [torch.empty(0, device=device) for _ in range(SLOTS)]
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
        self._read: list[Any] = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]

    def send(self, slot: int, pieces: Sequence[Tensor]) -> Tensor:
        shape, first = _joined(pieces), pieces[0]
        self._copied[slot].synchronize()  # the pinned buffer's last copy has left it
        self._pinned[slot] = _room(self._pinned[slot], shape, first, pinned=True)
        held = self._buffers[slot]
        self._buffers[slot] = _room(held, shape, first, device=self._device)
        if self._buffers[slot] is not held:  # made on the caller's stream, written on this one
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._buffers[slot].record_stream(self._stream)
        host = torch.cat(list(pieces), dim=2, out=_view(self._pinned[slot], shape))
        buffer = _view(self._buffers[slot], shape)
        self._stream.wait_event(self._read[slot])
        with torch.cuda.stream(self._stream):
            buffer.copy_(host, non_blocking=True)
            self._copied[slot].record(self._stream)
        return buffer

    def landed(self, slot: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied[slot])

    def read(self, slot: int) -> None:
        self._read[slot].record(torch.cuda.current_stream(self._device))


def make_lane(device: torch.device) -> Lane:
    """For caches on `device`. One caller at a time may use it."""
    return CudaLane(device) if device.type == "cuda" else HostLane()


@dataclass(frozen=True)
class Arriving:
    """Rows in host memory. pieces: `[source layers, 2, tokens, heads, dim]`, keys and values, in order."""

    pieces: Sequence[Tensor]

    @property
    def tokens(self) -> int:
        return sum(int(piece.shape[2]) for piece in self.pieces)

    def groups(self, most: int) -> Iterator[list[Tensor]]:
        """Neighbouring pieces of about `most` tokens; a longer piece is cut."""
        held: list[Tensor] = []
        count = 0
        for whole in self.pieces:
            for piece in torch.split(whole, most, dim=2):
                if held and count + piece.shape[2] > most:
                    yield held
                    held, count = [], 0
                held.append(piece)
                count += int(piece.shape[2])
        if held:
            yield held


def apply_arriving(
    applier: Applier,
    source: Arriving,
    target: Rows,
    strip: RotaryTable,
    rotate: RotaryTable,
    lane: Lane,
    *,
    group_tokens: int = GROUP_TOKENS,
) -> Tensor:
    """`Applier.apply` for rows that arrive. target: by slot (page size 1) or in order; strip, rotate: of all
    tokens, on its device.

    Returns a 0-dimensional bool on the device, true if all that was written is finite; only reading it waits.
    Errors: `ValueError` where the numbers of tokens differ.
    """
    if source.tokens != target.tokens or target.page_size != 1:
        raise ValueError("as many tokens must arrive as are written, by slot")
    finite = torch.ones((), dtype=torch.bool, device=target.device)
    start = 0
    for number, pieces in enumerate(source.groups(group_tokens)):
        # Launches do not wait: on a GPU this copy runs while the group before it is mapped.
        slot = number % SLOTS
        rows = lane.send(slot, pieces)
        tokens = int(rows.shape[2])
        span = slice(start, start + tokens)
        lane.landed(slot)
        arrived = Rows(list(rows[:, 0].unbind(0)), list(rows[:, 1].unbind(0)), tokens)
        done = applier.apply(arrived, _part(target, span), _at(strip, span), _at(rotate, span))
        lane.read(slot)
        finite.logical_and_(done.to(torch.bool))
        start += tokens
    return finite


def _part(rows: Rows, span: slice) -> Rows:
    tokens = span.stop - span.start
    if rows.slots is None:
        return Rows([k[span] for k in rows.keys], [v[span] for v in rows.values], tokens)
    return Rows(rows.keys, rows.values, tokens, rows.slots[span])


def _at(table: RotaryTable, span: slice) -> RotaryTable:
    return RotaryTable(table.cos[span], table.sin[span], table.pairing, table.scale)


def _joined(pieces: Sequence[Tensor]) -> tuple[int, ...]:
    layers, sides, _, heads, dim = pieces[0].shape
    return layers, sides, sum(int(piece.shape[2]) for piece in pieces), heads, dim


def _room(
    held: Tensor,
    shape: tuple[int, ...],
    like: Tensor,
    *,
    device: torch.device | None = None,
    pinned: bool = False,
) -> Tensor:
    """`held` where it is large enough and of the right dtype, else a new buffer."""
    size = math.prod(shape)
    if held.numel() >= size and held.dtype == like.dtype:
        return held
    return torch.empty(size, dtype=like.dtype, device=device or "cpu", pin_memory=pinned)


def _view(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    return buffer[: math.prod(shape)].view(shape)
