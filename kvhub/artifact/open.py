"""Open the tensors of an artifact, headers checked before anything is mapped."""

from __future__ import annotations

from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.artifact.listing import weight_shards
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.tensors import Shape, expected_tensors, stored_dtype
from kvhub.errors import Corrupt
from kvhub.model.headers import TensorHeader, read_header
from kvhub.strict_json import shown

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 20
"""Bytes read at once by `check_tensors`."""
_STORED = {"float32": "F32", "bfloat16": "BF16", "int8": "I8"}
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80)}


def open_tensors(directory: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Every tensor by name, on the CPU in its `stored_dtype`, in memory of its own.

    Exactly `expected_tensors(manifest)` must be there, each once, with its shape and dtype and
    finite values. Errors: `Corrupt`, `NotFound`, `AccessDenied`.
    """
    expected = expected_tensors(manifest)
    places: dict[str, str] = {}
    for file in weight_shards(manifest):
        if (directory / file).is_symlink():
            raise Corrupt(f"{file} is a symlink")
        for name in _checked_names(directory / file, expected, manifest):
            if name in places:
                raise Corrupt(f"tensor {name!r} is in two files")
            places[name] = file
    if missing := expected.keys() - places.keys():
        raise Corrupt(f"tensor {min(missing)!r} is missing")
    tensors: dict[str, Tensor] = {}
    for file in weight_shards(manifest):
        names = [name for name, place in places.items() if place == file]
        tensors |= _read(directory / file, names)
    return {name: tensors[name] for name in expected}


def check_tensors(directory: Path, manifest: Manifest) -> None:
    """Everything that `open_tensors` refuses, without holding the tensors: memory of one block.

    Reads every byte once and needs no torch. Errors: `Corrupt`, `NotFound`, `AccessDenied`.
    """
    expected = expected_tensors(manifest)
    seen: set[str] = set()
    for file in weight_shards(manifest):
        path = directory / file
        if path.is_symlink():
            raise Corrupt(f"{file} is a symlink")
        header = _checked_header(path, expected, manifest)
        if twice := seen & header.keys():
            raise Corrupt(f"tensor {min(twice)!r} is in two files")
        seen |= header.keys()
        with path.open("rb") as data:
            for name, tensor in header.items():
                if not _finite(data, tensor):
                    raise Corrupt(f"{file}: {name!r} has NaN or infinite values")
    if missing := expected.keys() - seen:
        raise Corrupt(f"tensor {min(missing)!r} is missing")


def _finite(file: BufferedReader, tensor: TensorHeader) -> bool:
    """Whether no exponent of the stored numbers is all ones; whole numbers have none."""
    import numpy

    if tensor.dtype == "I8":
        return True
    kind, ones = _EXPONENTS[tensor.dtype]
    file.seek(tensor.start)
    left = tensor.end - tensor.start
    bits = numpy.empty(min(left, BLOCK) // numpy.dtype(kind).itemsize, dtype=kind)
    while left:
        block = bits[: min(left, BLOCK) // bits.itemsize]
        if file.readinto(block.data) != block.nbytes:
            return False  # cut short meanwhile
        if int(numpy.bitwise_and(block, block.dtype.type(ones), out=block).max()) == ones:
            return False
        left -= block.nbytes
    return True


def _checked_names(path: Path, expected: dict[str, Shape], manifest: Manifest) -> list[str]:
    return list(_checked_header(path, expected, manifest))


def _checked_header(path: Path, expected: dict[str, Shape], manifest: Manifest) -> dict[str, TensorHeader]:
    header = read_header(path)
    for name, tensor in header.items():
        if name not in expected:
            raise Corrupt(f"{path.name}: tensor {name[:80]!r} does not belong to the mapper")
        if tensor.shape != expected[name]:
            raise Corrupt(f"{path.name}: {name!r} is {list(tensor.shape)}, not {list(expected[name])}")
        dtype = stored_dtype(name, manifest)
        if tensor.dtype != _STORED[dtype]:
            raise Corrupt(f"{path.name}: {name!r} is {tensor.dtype[:16]!r}, not {dtype}")
    return header


def _read(path: Path, names: list[str]) -> dict[str, Tensor]:
    import torch  # here, because listing and verifying must not load it
    from safetensors import SafetensorError, safe_open

    tensors = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in names:
                # A copy: a file truncated under a mapping would end the process (SIGBUS).
                tensors[name] = file.get_tensor(name).clone()
    except (SafetensorError, OSError) as error:
        raise Corrupt(f"{path.name} cannot be read: {shown(error)}") from None
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise Corrupt(f"{path.name}: {name!r} has NaN or infinite values")
    return tensors
