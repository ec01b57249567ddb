"""Cached rows of a model: a paged pool or contiguous tensors, addressed by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """`tokens` rows in every layer of a cache.

    keys, values: per layer `[slots, heads, dim]` (NHD), the last two dimensions contiguous.
    slots: `[>= tokens / page_size]` int64, the pages that the tokens lie in, page p covering slots
    `p * page_size ...`; with page_size 1, the slots. None: token i lies in slot i. Rows to be read may
    repeat a page; rows to be written must not.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    tokens: int
    slots: Tensor | None = None
    page_size: int = 1

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.values) or not self.keys:
            raise ValueError("a cache has as many layers of keys as of values, and at least one")
        first = self.keys[0]
        for layer in (*self.keys, *self.values):
            if layer.shape != first.shape or layer.dtype != first.dtype or layer.dim() != 3:
                raise ValueError("all layers of a cache must be [slots, heads, dim] of one shape and dtype")
            if layer.stride()[1:] != (layer.shape[2], 1):
                raise ValueError("a row must be contiguous over heads and dimensions")
        if self.slots is None:
            if self.tokens > first.shape[0]:
                raise ValueError(f"{self.tokens} tokens in {first.shape[0]} slots")
        elif self.slots.dtype != torch.int64 or self.slots.dim() != 1 or self.page_size < 1:
            raise ValueError("slots must be a list of int64")
        elif self.slots.shape[0] * self.page_size < self.tokens:
            raise ValueError(f"{self.tokens} tokens in {self.slots.shape[0]} pages of {self.page_size}")

    @property
    def heads(self) -> int:
        return int(self.keys[0].shape[1])

    @property
    def dim(self) -> int:
        return int(self.keys[0].shape[2])

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    def token_slots(self) -> Tensor | None:
        """`[tokens]` int64: the slot of every token, pages spelled out; None: in order."""
        if self.slots is None or self.page_size == 1:
            return self.slots if self.slots is None else self.slots[: self.tokens]
        inside = torch.arange(self.page_size, device=self.slots.device)
        pages = self.slots[: -(-self.tokens // self.page_size), None]
        return (pages * self.page_size + inside).flatten()[: self.tokens]
