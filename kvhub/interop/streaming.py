"""Tensors one at a time: read when they are asked for, written as they are made.

A mapper has up to 12 GB; neither import nor export may hold all of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from kvhub.artifact.listing import weight_shards
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.open import check_tensors
from kvhub.artifact.stream import write_stream
from kvhub.errors import Corrupt
from kvhub.model.headers import read_header
from kvhub.strict_json import shown

Key = TypeVar("Key")


class Made(Mapping[Key, Tensor]):
    """A mapping whose tensors are made anew whenever one is asked for, and kept by nobody."""

    def __init__(self, keys: Iterable[Key], make: Callable[[Key], Tensor]) -> None:
        self._keys = dict.fromkeys(keys)
        self._make = make

    def __getitem__(self, key: Key) -> Tensor:
        if key not in self._keys:
            raise KeyError(key)
        return self._make(key)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def read_tensor(path: Path, name: str) -> Tensor:
    """One tensor of a file whose header was checked, in memory of its own. Errors: `Corrupt`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            # A copy: a file truncated under a mapping would end the process (SIGBUS).
            tensor: Tensor = file.get_tensor(name).clone()
            return tensor
    except (SafetensorError, OSError) as error:
        raise Corrupt(f"{path.name} cannot be read: {shown(error)}") from None


def tensors_of(directory: Path, manifest: Manifest) -> Made[str]:
    """The tensors of one of our artifacts; all names, shapes and values are checked first, block by block.

    Errors: `Corrupt`, `NotFound`, `AccessDenied`.
    """
    check_tensors(directory, manifest)
    places = {
        name: directory / file for file in weight_shards(manifest) for name in read_header(directory / file)
    }
    return Made(places, lambda name: read_tensor(places[name], name))


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], make: Callable[[str], Tensor]
) -> None:
    """A file of float32 tensors, each made when it is its turn, on disk before this returns."""
    with path.open("xb") as file:
        kinds = {name: (torch.float32, shape) for name, shape in shapes.items()}
        write_stream(file, kinds, make, {"format": "pt"})
        file.flush()
        os.fsync(file.fileno())
