"""Cached rows of a model: a paged pool or contiguous tensors, addressed by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvhub_kernels.plan import Plan
from kvhub_kernels.rotary import RotaryTable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of rows that are read or written."""


@dataclass(frozen=True)
class Rows:
    """`tokens` rows in every layer of a cache.

    keys, values: per layer `[slots, heads, dim]` (NHD), the last two dimensions contiguous.
    slots: `[>= tokens / page_size]` int64, contiguous, the pages that the tokens lie in, page p covering
    slots `p * page_size ...`; with page_size 1, the slots. None: token i lies in slot i. Rows to be read may
    repeat a page; rows to be written must not: which of two tokens stays there is not said. What pages
    hold is not checked, since that would wait for the device: one outside the pool is memory of others.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    tokens: int
    slots: Tensor | None = None
    page_size: int = 1

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.values) or not self.keys:
            raise ValueError("a cache has as many layers of keys as of values, and at least one")
        if self.tokens < 0:
            raise ValueError(f"{self.tokens} tokens")
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
        elif not self.slots.is_contiguous():  # kernels read it by address
            raise ValueError("slots must be contiguous")
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

    @cached_property
    def slot_stride(self) -> int:
        """Elements from slot to slot. Errors: `ValueError` where layers, or keys and values, differ in it."""
        strides = {layer.stride(0) for layer in (*self.keys, *self.values)}
        if len(strides) > 1:
            raise ValueError("all layers of a cache, keys and values, must have one stride from slot to slot")
        return strides.pop()

    def token_slots(self) -> Tensor | None:
        """`[tokens]` int64: the slot of every token, pages spelled out; None: in order."""
        if self.slots is None or self.page_size == 1:
            return self.slots if self.slots is None else self.slots[: self.tokens]
        inside = torch.arange(self.page_size, device=self.slots.device)
        pages = self.slots[: -(-self.tokens // self.page_size), None]
        return (pages * self.page_size + inside).flatten()[: self.tokens]


def check_call(
    plan: Plan,
    source: Rows,
    target: Rows,
    strip: RotaryTable,
    rotate: RotaryTable,
    layers: Sequence[int] | None = None,
    *,
    device: torch.device,
) -> None:
    """That a mapper of `plan` can be applied so: what `Applier.apply` asks of its arguments, on any device.

    device: where the weights are. Compares numbers only. Errors: `ValueError`; nothing has been written then.
    """
    wanted = range(plan.layers) if layers is None else layers
    if not all(0 <= layer < min(plan.layers, len(target.keys)) for layer in wanted):
        raise ValueError(f"target layers {list(wanted)} of a cache of {len(target.keys)}")
    if plan.used[-1] >= len(source.keys):
        raise ValueError(f"source layer {plan.used[-1]} of a cache of {len(source.keys)}")
    for rows, heads, dim in (
        (source, plan.source_heads, plan.source_dim),
        (target, plan.target_heads, plan.target_dim),
    ):
        if rows.heads != heads or rows.dim != dim:
            raise ValueError(f"rows of {rows.heads} heads of {rows.dim}, the mapper has {heads} of {dim}")
        if rows.dtype not in DTYPES:
            raise ValueError(f"rows in {rows.dtype}; float32, bfloat16 and float16 are known")
    if target.tokens < source.tokens:
        raise ValueError(f"{source.tokens} tokens do not go into {target.tokens}")
    parts = {"source's rows": source.device, "target's rows": target.device}
    parts |= {
        f"{name} slots": r.slots.device
        for name, r in (("source's", source), ("target's", target))
        if r.slots is not None
    }
    parts |= {"source's rotation": strip.cos.device, "target's rotation": rotate.cos.device}
    for name, found in parts.items():
        if found != source.device or found.type != device.type or device.index not in (None, found.index):
            raise ValueError(
                f"the {name} are on {found}, the source's rows on {source.device}, the mapper on {device}"
            )
    for table, dim in ((strip, plan.source_dim), (rotate, plan.target_dim)):
        if table.cos.shape[0] < source.tokens or table.sin.shape != table.cos.shape:
            raise ValueError(f"a rotation at {table.cos.shape[0]} positions for {source.tokens} tokens")
        if table.rotary_dim > dim:
            raise ValueError(f"{table.rotary_dim} dimensions to turn in heads of {dim}")
