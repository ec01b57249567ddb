"""Development and CI only: stands in for the CUDA extension `sgl_kernel`.

SGLang 0.5.23 imports the names below on its CPU path, whatever the model; every
wheel of the real extension links the NVIDIA driver. No `torch.ops.sgl_kernel`
operator is registered here, so SGLang finds no AMX support and takes its own
torch forwards. The two helpers of the memory pools work; the other names belong to
speculative decoding and raise when they are called.

Never install this beside `sglang-kernel`: both provide this module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NoReturn

from torch import Tensor

__version__ = "0.0.0+kvhub.cpu"


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Move rows `src_loc` to `tgt_loc` in each buffer (addresses, and bytes a row).

    All rows are read before one is written, as the two sets may overlap.
    """
    sources, targets = src_loc.tolist(), tgt_loc.tolist()
    for address, width in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + row * width, width) for row in sources]
        for row, content in zip(targets, rows, strict=True):
            ctypes.memmove(address + row * width, content, width)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write each request's new slots, packed in `out_cache_loc`, into its row of the table."""
    taken = 0
    for request, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True
    ):
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[request, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def _unavailable(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} is not part of kvhub-sglang-cpu (development and CI only)")

    refuse.__name__ = name
    return refuse


assign_draft_cache_locs_contiguous_cpu = _unavailable("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _unavailable("assign_extend_cache_locs_cpu")
build_draft_decode_metadata_cpu = _unavailable("build_draft_decode_metadata_cpu")
build_tree_kernel_efficient_cpu = _unavailable("build_tree_kernel_efficient_cpu")
fill_accept_out_cache_loc_cpu = _unavailable("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _unavailable("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _unavailable("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _unavailable("verify_tree_greedy_cpu")
