"""Whether every weight is a number.

A fit reads a target through its cache alone: NaN in its final norm or head would leave no trace in the
mapper, and everything that is generated on it would be rubbish. So the files are looked at, once each.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.errors import AccessDenied, BadInput, Corrupt
from kvhub.model.fingerprint import weight_files
from kvhub.model.headers import TensorHeader, read_header

if TYPE_CHECKING:
    import torch

PIECE = 8 << 20
"""Bytes read at a time; no weight is held whole."""

_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_WIDER = {
    "bfloat16": ("F64", "F32"),
    "float16": ("F64", "F32", "BF16"),
    "float32": ("F64",),
}
"""Types that hold numbers which the key cannot."""
_known: set[tuple[str, ...]] = set()
"""Files that this process has looked at, by place, size, mtime, inode and dtype."""


def demand_finite(path: Path, dtype: torch.dtype | None = None) -> None:
    """Refuse a model in directory `path` of whose weights one is NaN or infinite.

    dtype: what the model will run in; None: as the files have it. Reads every byte once a process, about
    as fast as the disk gives them. Errors: `Corrupt` naming file and tensor; `BadInput` where a weight is a
    number that only `dtype` cannot hold; those of `weight_files` and `read_header`.
    """
    kind = None if dtype is None else str(dtype).removeprefix("torch.")
    for file in weight_files(path):
        state = file.stat()
        key = (str(file.absolute()), str(kind), *map(str, (state.st_size, state.st_mtime_ns, state.st_ino)))
        if key not in _known:
            _demand(file, kind)
            _known.add(key)


def _demand(path: Path, kind: str | None) -> None:
    tensors = [(name, tensor) for name, tensor in read_header(path).items() if tensor.dtype in _NAMES]
    buffer = bytearray(min(PIECE, max((tensor.end - tensor.start for _, tensor in tensors), default=0)))
    view = memoryview(buffer)
    try:
        with path.open("rb", buffering=0) as file:
            for name, tensor in sorted(tensors, key=lambda item: item[1].start):
                file.seek(tensor.start)
                left = tensor.end - tensor.start
                while left:
                    size = min(len(buffer), left)
                    done = 0
                    while done < size:
                        read = file.readinto(view[done:size])
                        if not read:
                            raise Corrupt(f"{path.name} became shorter while it was read", "start again")
                        done += read
                    left -= size
                    _look(path, name, tensor, buffer, size, kind)
    except PermissionError:
        raise AccessDenied(f"{path} may not be read") from None


def _look(
    path: Path, name: str, tensor: TensorHeader, buffer: bytearray, size: int, kind: str | None
) -> None:
    import torch

    stored = getattr(torch, _NAMES[tensor.dtype])
    numbers = torch.frombuffer(buffer, dtype=stored, count=size // stored.itemsize)
    if not _finite(numbers):
        raise Corrupt(
            f"{path}: {name[:120]} holds NaN or infinity",
            "download the model again; a model that was published so cannot be used",
        )
    if (
        kind is not None
        and tensor.dtype in _WIDER.get(kind, ())
        and not _finite(numbers.to(getattr(torch, kind)))
    ):
        raise BadInput(f"{path}: {name[:120]} holds numbers that {kind} cannot", _hint(numbers, kind))


def _hint(numbers: torch.Tensor, kind: str) -> str:
    import torch

    # Of this piece of this tensor: another one may hold what is too large for them too.
    fit = [d for d in ("bfloat16", "float32") if d != kind and _finite(numbers.to(getattr(torch, d)))]
    return f"use --dtype {' or '.join(fit)}" if fit else "its numbers are too large for every --dtype"


def _finite(numbers: torch.Tensor) -> bool:
    import torch

    # NaN and infinity survive a sum, which is forty times faster than a look at each number; a sum may
    # overflow by itself, so that it only acquits.
    return bool(torch.isfinite(numbers.sum())) or bool(torch.isfinite(numbers).all())
