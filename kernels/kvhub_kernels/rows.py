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
    slots: `[tokens]` int64, where token i lies; None: token i lies in slot i. Rows to be read may
    repeat a slot; rows to be written must not.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    tokens: int
    slots: Tensor | None = None

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
        elif self.slots.shape != (self.tokens,) or self.slots.dtype != torch.int64:
            raise ValueError("slots must be int64, one for each token")

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


def slots_of_pages(pages: Tensor, page_size: int, tokens: int) -> Tensor:
    """Slots of the first `tokens` tokens of a sequence that lies in `pages`, `[tokens]` int64.

    pages: `[>= tokens / page_size]` integers, page p covering slots `p * page_size ...`.
    """
    inside = torch.arange(page_size, device=pages.device, dtype=torch.int64)
    count = -(-tokens // page_size)
    if count > pages.shape[0]:
        raise ValueError(f"{tokens} tokens need {count} pages of {page_size}, got {pages.shape[0]}")
    return (pages[:count, None].to(torch.int64) * page_size + inside).flatten()[:tokens]
