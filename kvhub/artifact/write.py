"""Write an artifact: whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvhub.artifact.layout import CONFIG, INDEX, MANIFEST, SHARD_BYTES, shard_name
from kvhub.artifact.manifest import FileEntry, Manifest
from kvhub.artifact.stream import write_stream
from kvhub.artifact.tensors import Shape, expected_tensors, stored_bytes, stored_dtype
from kvhub.errors import BadInput
from kvhub.files import writing
from kvhub.model.identity import canonical_json


def write_artifact(directory: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Manifest:
    """Write manifest, weights, index and config.json into `directory`, which must not hold anything.

    tensors: exactly `expected_tensors(manifest)`, in any float dtype; stored as `stored_dtype` says. Each is
    asked for once, when it is written, and not kept: a mapping may make it then.
    `manifest.files` is ignored; the returned manifest has it filled. The directory appears by one
    rename, so a crash, a full disk or Ctrl-C leaves nothing behind that looks like an artifact.
    Errors: `BadInput` (directory in use; tensors missing, misshapen or not finite), `AccessDenied`,
    `KvhubError` (disk full).
    """
    _check(manifest, tensors)
    directory = directory.absolute()
    if _in_use(directory):
        raise BadInput(f"{directory} exists already", "choose another directory, or remove it first")
    with writing(directory, "choose another directory"):
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name[:64]}.", dir=directory.parent))
        try:
            written = _fill(temporary, manifest, tensors)
            temporary.chmod(0o777 & ~_umask())  # mkdtemp's 0700 would follow the artifact
            _sync_directory(temporary)
            temporary.rename(directory)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync_directory(directory.parent)
    return written


def _in_use(directory: Path) -> bool:
    if directory.is_symlink() or not directory.is_dir():
        return directory.is_symlink() or directory.exists()
    return any(directory.iterdir())


def _check(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    expected = expected_tensors(manifest)
    if set(tensors) != set(expected):
        wrong = min(set(tensors) ^ set(expected))
        raise BadInput(f"tensor {wrong!r} is {'missing' if wrong in expected else 'not part of the mapper'}")


def _fill(directory: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Manifest:
    shards, shapes = list(_shards(manifest)), expected_tensors(manifest)
    entries: list[FileEntry] = []
    weight_map: dict[str, str] = {}
    total = 0
    for index, names in enumerate(shards):
        file = shard_name(index, len(shards))
        weight_map |= dict.fromkeys(names, file)
        total += sum(stored_bytes(name, shapes[name], manifest) for name in names)
        entries.append(_shard(directory / file, {name: shapes[name] for name in names}, manifest, tensors))
    if len(shards) > 1:
        listing = {"metadata": {"total_size": total}, "weight_map": weight_map}
        entries.append(_write(directory / INDEX, canonical_json(listing) + b"\n"))
    entries.append(_write(directory / CONFIG, canonical_json(_summary(manifest)) + b"\n"))
    complete = manifest.model_copy(update={"files": sorted(entries, key=lambda entry: entry.name)})
    _write(directory / MANIFEST, complete.to_bytes())
    return complete


def _shards(manifest: Manifest) -> Iterator[list[str]]:
    """Tensor names by shard: whole target layers, at most `SHARD_BYTES` unless one layer is larger."""
    layers: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for name, shape in expected_tensors(manifest).items():
        layer = name.split(".")[1]
        layers.setdefault(layer, []).append(name)
        sizes[layer] = sizes.get(layer, 0) + stored_bytes(name, shape, manifest)
    shard: list[str] = []
    filled = 0
    for layer, names in layers.items():
        if shard and filled + sizes[layer] > SHARD_BYTES:
            yield shard
            shard, filled = [], 0
        shard = [*shard, *names]
        filled += sizes[layer]
    yield shard


def _shard(
    path: Path, shapes: Mapping[str, Shape], manifest: Manifest, tensors: Mapping[str, Tensor]
) -> FileEntry:
    kinds = {name: (getattr(torch, stored_dtype(name, manifest)), shape) for name, shape in shapes.items()}
    with path.open("xb") as file:
        digest, size = write_stream(
            file, kinds, lambda name: _stored(name, tensors[name], *kinds[name]), {"format": "pt"}
        )
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name=path.name, sha256=digest, size=size)


def _stored(name: str, tensor: Tensor, dtype: torch.dtype, shape: Shape) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise BadInput(f"tensor {name!r} is {list(tensor.shape)}, not {list(shape)}")
    stored = tensor.detach().to("cpu", dtype)
    if not bool(torch.isfinite(stored).all()):
        raise BadInput(
            f"tensor {name!r} has NaN or infinite values", "raise the regularisation or check the text"
        )
    return stored


def _summary(manifest: Manifest) -> dict[str, object]:
    # The Hub counts a download for each request of config.json, and shows it; nothing reads it back.
    return {
        "model_type": "kvhub-mapper",
        "library_name": "kvhub",
        "kvhub_version": manifest.kvhub_version,
        "family": manifest.family,
        "support": manifest.support,
        "k": manifest.k,
        "source": manifest.source.name,
        "target": manifest.target.name,
        "exact_prefix": manifest.exact_prefix,
        "dtype": manifest.weights_dtype,
    }


def _write(path: Path, data: bytes) -> FileEntry:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(name=path.name, sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
