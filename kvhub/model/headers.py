"""The header of a safetensors file, read without mapping the file.

Format: 8 bytes little-endian length N, N bytes of JSON, then the tensor bytes without gaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhub.errors import AccessDenied, Corrupt, NotFound
from kvhub.strict_json import parse_object

HEADER_LIMIT = 25_000_000
"""Bytes of JSON; real headers are below 1 % of this, and the official library stops at 100 MB."""

ITEMSIZE = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}
_ONE_BYTE = {"BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}


@dataclass(frozen=True)
class TensorHeader:
    """One tensor: `dtype` in safetensors' words, and its bytes `[start, end)` in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path, *, limit: int = HEADER_LIMIT) -> dict[str, TensorHeader]:
    """Every tensor of the file by name, checked against the file's size.

    Errors: `NotFound`, `AccessDenied`, `Corrupt` (truncated, overlapping, gaps, over `limit`).
    """
    return read_described(path, limit=limit)[0]


def read_described(
    path: Path, *, limit: int = HEADER_LIMIT
) -> tuple[dict[str, TensorHeader], dict[str, str]]:
    """`read_header`, and the words that the file has about itself (what is not text is left out)."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise Corrupt(f"{path.name}: the file is shorter than its header says")
            if length > limit:
                raise Corrupt(f"{path.name}: header of {length} bytes, more than {limit}")
            data = file.read(length)
    except FileNotFoundError:
        raise NotFound(f"{path} does not exist") from None
    except PermissionError:
        raise AccessDenied(f"{path} may not be read") from None
    entries = parse_object(data, f"{path.name}: header")
    about = entries.pop("__metadata__", None)
    tensors = {name: _tensor(path.name, name, entry, 8 + length) for name, entry in entries.items()}
    _check_layout(path.name, tensors, 8 + length, size)
    words = about if isinstance(about, dict) else {}
    return tensors, {name: word for name, word in words.items() if isinstance(word, str)}


def _tensor(file: str, name: str, entry: Any, base: int) -> TensorHeader:
    def integers(value: Any, at_most: int) -> bool:
        return (
            isinstance(value, list)
            and len(value) <= at_most
            and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
        )

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Corrupt(f"{file}: tensor {name[:80]!r} is not described as dtype, shape and offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and integers(shape, 16) and integers(offsets, 2) and len(offsets) == 2):
        raise Corrupt(f"{file}: tensor {name[:80]!r} has a malformed header")
    itemsize = 1 if dtype in _ONE_BYTE else ITEMSIZE.get(dtype)
    start, end = offsets
    if itemsize is not None and end - start != itemsize * math.prod(shape):
        raise Corrupt(f"{file}: tensor {name[:80]!r} does not fill its bytes")
    return TensorHeader(dtype, tuple(shape), base + start, base + end)


def _check_layout(file: str, tensors: dict[str, TensorHeader], base: int, size: int) -> None:
    position = base
    for tensor in sorted(tensors.values(), key=lambda item: (item.start, item.end)):
        if tensor.start != position or tensor.end < tensor.start:
            raise Corrupt(f"{file}: tensors overlap or leave gaps")
        position = tensor.end
    if position != size:
        raise Corrupt(f"{file}: the file is {size} bytes, its header describes {position}")
