"""A safetensors file written while its tensors are made: memory of one tensor, the library's own bytes.

Format: 8 bytes little-endian length of the header, JSON padded with spaces to a multiple of 8, tensors
without gaps. Order: as the library writes it, wider numbers first and names within, so that all are aligned.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

import torch
from torch import Tensor

KINDS = {
    torch.int8: "I8",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""Narrow to wide, in the library's order."""
_PIECE = 16 << 20

Kind = tuple[torch.dtype, Sequence[int]]
"""Dtype and shape of a tensor."""


def write_stream(
    file: BinaryIO,
    kinds: Mapping[str, Kind],
    make: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> tuple[str, int]:
    """Write the tensors of `kinds`, each made when it is its turn; returns (sha256, bytes) of the file.

    `make(name)` gives a tensor of that shape; it is converted to that dtype, 16 MiB at a time in main
    memory. The caller syncs. Errors: `OSError`, and what `make` raises.
    """
    ranks = {dtype: number for number, dtype in enumerate(KINDS)}
    names = sorted(sorted(kinds), key=lambda name: ranks[kinds[name][0]], reverse=True)
    digest, total = hashlib.sha256(), 0
    for piece in _header(names, kinds, metadata):
        digest.update(piece)
        total += file.write(piece)
    for name in names:
        dtype, shape = kinds[name]
        tensor = make(name).detach()
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"tensor {name!r} is {list(tensor.shape)}, not {list(shape)}")
        flat = tensor.contiguous().reshape(-1)
        del tensor
        step = _PIECE // dtype.itemsize
        for start in range(0, flat.numel(), step):
            raw = raw_bytes(flat[start : start + step].to("cpu", dtype))
            digest.update(raw)
            total += file.write(raw)
    return digest.hexdigest(), total


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, not copied where it is in main memory."""
    return memoryview(tensor.reshape(-1).cpu().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _header(
    names: Sequence[str], kinds: Mapping[str, Kind], metadata: Mapping[str, str] | None
) -> tuple[bytes, bytes]:
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name in names:
        dtype, shape = kinds[name]
        end = at + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": KINDS[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little"), text
