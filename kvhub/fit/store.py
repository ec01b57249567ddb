"""Large safetensors files, written and read without a copy in memory, and written whole or not at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from kvhub.artifact.stream import KINDS, write_stream
from kvhub.artifact.stream import raw_bytes as raw_bytes
from kvhub.files import write_bytes as write_bytes
from kvhub.files import writing
from kvhub.model.headers import read_described

_OLD = 86400.0
"""Seconds."""
_DTYPES = {name: dtype for dtype, name in KINDS.items()}
_PIECE = 4 << 20


class TensorFile:
    """A file of `write_tensors`, read with plain reads: pages of a mapped one count as this process's."""

    def __init__(self, path: Path) -> None:
        """Errors: those of `read_described`; `OSError`."""
        self._tensors, self.metadata = read_described(path)
        self._file = path.open("rb", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def tensor(self, name: str) -> Tensor:
        """A tensor of its own memory. Errors: `KeyError`, `OSError`."""
        about = self._tensors[name]
        found = torch.empty(about.shape, dtype=_DTYPES[about.dtype])
        self._fill(found, about.start)
        return found

    def rows(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Rows `start:stop` of a matrix, some MB at a time: (the first one's number, the rows).

        Every turn uses the memory of the one before. Errors: `KeyError`, `OSError`.
        """
        about = self._tensors[name]
        width = about.shape[1]
        dtype = _DTYPES[about.dtype]
        step = max(1, _PIECE // max(1, width * dtype.itemsize))
        piece = torch.empty(min(step, stop - start), width, dtype=dtype)
        for at in range(start, stop, step):
            part = piece[: min(step, stop - at)]
            self._fill(part, about.start + at * width * dtype.itemsize)
            yield at, part

    def _fill(self, tensor: Tensor, offset: int) -> None:
        """Errors: `OSError` where the file ends too soon."""
        into = raw_bytes(tensor)
        self._file.seek(offset)
        done = 0
        while done < len(into):
            count = self._file.readinto(into[done:])
            if not count:
                raise OSError(f"{self._file.name} ends too soon")
            done += count


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write `path` as safetensors, replacing it in one step; returns the sha256 of the file.

    The library's own writer first copies every tensor; here the largest piece held twice is 16 MiB, so
    that saving moments does not double them. Errors: `AccessDenied`, `KvhubError` (disk full).
    """
    temporary: Path | None = None
    with writing(path):
        try:
            descriptor, name = tempfile.mkstemp(prefix=f".writing-{os.getpid()}-", dir=path.parent)
            temporary = Path(name)
            with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
                kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
                digest, _ = write_stream(file, kinds, tensors.__getitem__, metadata)
                file.flush()
                os.fsync(descriptor)
            temporary.replace(path)
            temporary = None
        finally:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
    return digest


def sweep(directory: Path) -> None:
    """Remove what killed writers left unfinished in `directory`; what a living process writes stays.

    Older than a day is unfinished for good, whoever has that number now.
    """
    for path in directory.glob(".writing-*"):
        number = path.name.split("-")[1]
        with suppress(FileNotFoundError):
            if (number.isdigit() and not _alive(int(number))) or time.time() - path.stat().st_mtime > _OLD:
                path.unlink()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def sha256_of(path: Path) -> str:
    """sha256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksum(tensors: Mapping[str, Tensor], about: str = "") -> str:
    """sha256 over `about` and the names, dtypes, shapes and bytes of tensors; kept in the file itself."""
    digest = hashlib.sha256(about.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()
