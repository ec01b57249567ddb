"""Large safetensors files, written without a copy in memory and whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvhub.errors import AccessDenied, KvhubError
from kvhub.files import write_bytes as write_bytes
from kvhub.model.identity import canonical_json

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
}
_PIECE = 16 << 20


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write `path` as safetensors, replacing it in one step; returns the sha256 of the file.

    The library's own writer first copies every tensor; here the largest piece held twice is 16 MiB, so
    that saving moments does not double them. Errors: `AccessDenied`, `KvhubError` (disk full).
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    data = canonical_json(header)
    data += b" " * (-len(data) % 8)
    digest = hashlib.sha256()
    temporary: Path | None = None
    try:
        descriptor, name = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
        temporary = Path(name)
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            for piece in (len(data).to_bytes(8, "little"), data):
                digest.update(piece)
                file.write(piece)
            for tensor in tensors.values():
                flat = tensor.detach().contiguous().reshape(-1)
                step = max(1, _PIECE // tensor.element_size())
                for start in range(0, flat.numel(), step):
                    raw = raw_bytes(flat[start : start + step])
                    digest.update(raw)
                    file.write(raw)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
        temporary = None
    except PermissionError:
        raise AccessDenied(f"{path.parent} may not be written") from None
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else (error.strerror or str(error))
        raise KvhubError(f"cannot write {path}: {reason}", "free some space" if full else "") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, not copied where it is in main memory."""
    return memoryview(tensor.reshape(-1).cpu().view(torch.uint8).numpy())  # type: ignore[arg-type]


def sha256_of(path: Path) -> str:
    """sha256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
