"""Buffers that are kept between calls, so that the hot path allocates nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Workspace:
    """Named scratch tensors that grow to the largest size ever asked for; contents are undefined."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The buffer `name` as a contiguous tensor; it is the caller's until `name` is taken again."""
        size = math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or held.numel() < size:
            held = torch.empty(size, dtype=dtype, device=self.device)
            self._held[name, dtype] = held
        return held[:size].view(tuple(shape))

    def held(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """The whole buffer `name`, if it was ever taken."""
        return self._held.get((name, dtype))

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self._held.values())
