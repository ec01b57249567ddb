"""Apply a mapper wherever its caches lie: the one entry point of this package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvhub_kernels.cpu import CpuApplier
from kvhub_kernels.joined import ONES
from kvhub_kernels.rotary import RotaryTable
from kvhub_kernels.rows import Rows
from kvhub_kernels.weights import Weights


class Applier(Protocol):
    """A mapper made ready for one device."""

    def apply(
        self,
        source: Rows,
        target: Rows,
        strip: RotaryTable,
        rotate: RotaryTable,
        layers: Sequence[int] | None = None,
    ) -> Tensor:
        """Write the target's rows of `layers` (None: all) into `target`, keys rotated.

        strip, rotate: the source's and the target's rotation at the rows' positions, a row for each
        token: one row is not spread over all of them. Errors: `ValueError` (`check_call`), and nothing is
        written. Returns a 0-dimensional tensor on the device, true if every value written is finite; it is
        valid until the next call, and reading it is the only thing that waits for the device.
        """
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that it holds."""
        ...


def uses_triton(device: torch.device) -> bool:
    """On CUDA, and on the CPU where Triton's interpreter was asked for."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def ready_bytes(weights: Weights, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes that `make_applier` will hold for these weights, without making it."""
    plan = weights.plan
    columns = 2 * plan.layers * plan.groups * plan.columns
    int8 = weights.dtype == torch.int8
    size = columns * plan.depth * (1 if int8 else dtype.itemsize) + 4 * columns * (2 if int8 else 1)
    if not uses_triton(device) and dtype == torch.bfloat16:  # the bias is rows of the matrix
        size += columns * ONES * dtype.itemsize - 4 * columns
    return size if weights.norms is None else size + weights.norms.nbytes


def make_applier(
    weights: Weights, rotate: RotaryTable, *, device: torch.device | str, dtype: torch.dtype
) -> Applier:
    """Triton on CUDA, and on the CPU under TRITON_INTERPRET=1 (slow; a check); else the CPU path.

    rotate: a table of the target's rotation at any positions; it fixes how columns are paired.
    dtype: of the products. Errors: `ValueError` for what the path cannot do.
    """
    device = torch.device(device)
    if uses_triton(device):
        from kvhub_kernels.gpu import TritonApplier

        return TritonApplier(weights, rotate, device=device, dtype=dtype)
    return CpuApplier(weights, dtype)
