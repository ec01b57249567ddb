"""Several processes, one fit: `torchrun --nproc-per-node N -m kvhub.cli fit ...`.

Each process runs the models over its own windows. The rows, which are small, go to everybody in the order
of the windows; of the moments, which are large, each process adds up its own bands (`PairMoments.share`).
So the work and the memory are divided, and the sums are those of one process bit for bit: an all-reduce of
partial sums would round in another order for every number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from kvhub.errors import BadInput
from kvhub.fit.moments import PairMoments

Rows = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(content keys, values) of the source's and of the target's rows of one window."""


class Workers:
    """This process among those of a fit; without torchrun there is one, and nothing is sent."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def first(self) -> bool:
        """Whether this is the process that keeps, solves and writes."""
        return self.rank == 0

    def gather(self, rows: Rows | None, shapes: list[int], widths: tuple[int, int]) -> list[Rows]:
        """The rows of every process, in order; shapes: rows of each one's window (fewer at the end).

        Sent as float32, which holds every dtype that a cache has; given back as float64.
        """
        if self.size == 1:
            assert rows is not None
            return [rows]
        found: list[Rows] = []
        for owner, count in enumerate(shapes):
            parts = [torch.empty(count, widths[side], dtype=torch.float32) for side in (0, 0, 1, 1)]
            if owner == self.rank:
                assert rows is not None
                parts = [part.to("cpu", torch.float32) for side in rows for part in side]
            for part in parts:
                dist.broadcast(part, owner)
            a, b, c, d = (part.to(torch.float64) for part in parts)
            found.append(((a, b), (c, d)))
        return found

    def agree(self, wanted: bool) -> bool:
        """What the first process wants: its clock alone decides."""
        if self.size == 1:
            return wanted
        flag = torch.tensor([int(wanted)])
        dist.broadcast(flag, 0)
        return bool(flag.item())

    def collect(self, moments: PairMoments) -> None:
        """Put every band into the first process's moments; the others' stay as they are."""
        if self.size == 1:
            return
        for (kind, band), owner in moments.owners(self.size).items():
            if owner != 0:
                view = band.of(getattr(moments, kind))
                if self.rank == owner:
                    dist.send(view.to("cpu").contiguous(), 0)
                elif self.first:
                    part = torch.empty(view.shape, dtype=view.dtype)
                    dist.recv(part, owner)
                    view.copy_(part)

    def wait(self) -> None:
        """Until all processes are here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def workers() -> Iterator[Workers]:
    """The processes that torchrun started (`RANK`, `WORLD_SIZE`), or this one alone. Errors: `BadInput`."""
    try:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        raise BadInput("RANK and WORLD_SIZE must be numbers", "start with torchrun, or unset them") from None
    if size < 2:
        yield Workers()
        return
    dist.init_process_group("gloo", timeout=timedelta(days=2))  # the first one solves while others wait
    try:
        yield Workers(rank, size)
    finally:
        dist.destroy_process_group()
