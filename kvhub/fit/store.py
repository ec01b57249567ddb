"""Large safetensors files, written without a copy in memory and whole or not at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from kvhub.artifact.stream import raw_bytes as raw_bytes
from kvhub.artifact.stream import write_stream
from kvhub.files import write_bytes as write_bytes
from kvhub.files import writing

_OLD = 86400.0
"""Seconds."""


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
