"""HiCache without CUDA: unpinned host pools, and the `direct` copies in torch.

The copies have the names and arguments of `sgl_kernel.kvcacheio` that SGLang calls
with `--hicache-io-backend direct`. Layouts: `lf` is layer first (one tensor
`[tokens, ...]` a layer), `pf` is page first (`[pages, layers, page_size, ...]`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy rows between two layer-first pools."""
    sources, targets = src_indices.cpu(), dst_indices.cpu()
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[targets] = src[sources]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer from page-first host pools into layer-first rows."""
    pages, slots = src_indices // page_size, src_indices % page_size
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[pages, layer_id, slots]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy every layer (all K layers, then all V layers) into page-first host pools."""
    pages, slots = dst_indices // page_size, dst_indices % page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for i, src in enumerate(src_ptrs):
        dst_ptrs[i // layers][pages, i % layers, slots] = src[src_indices]


def register() -> None:
    """Called by SGLang in each process (entry point group `sglang.srt.plugins`).

    Does nothing outside the CPU engine.
    """
    from sglang.srt.utils import is_cpu

    if not is_cpu():
        return
    from sglang.srt.mem_cache.pool_host import base, mha, mla

    original = base.HostKVCache.__init__

    @functools.wraps(original)
    def unpinned(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["pin_memory"] = False  # there is no device to pin for
        original(self, *args, **kwargs)

    base.HostKVCache.__init__ = unpinned
    for module in (mha, mla):
        for copy in (
            transfer_kv_direct,
            transfer_kv_per_layer_direct_pf_lf,
            transfer_kv_all_layer_direct_lf_pf,
        ):
            setattr(module, copy.__name__, copy)
