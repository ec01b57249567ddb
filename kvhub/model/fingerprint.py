"""Which weights a model has: their Hub commit, or a fingerprint of the files.

The fingerprint covers every safetensors header whole (names, types, shapes), every file's size,
the start of every tensor and evenly spaced blocks of each file; files up to 32 MiB are read whole.
Fine-tuning moves nearly every weight and is always seen; a hand-made change of a few bytes between the
samples of a large file is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from kvhub.errors import AccessDenied, Corrupt, Incompatible, KvhubError, NotFound
from kvhub.model.headers import TensorHeader, read_header
from kvhub.settings import Settings
from kvhub.strict_json import parse_object, read_bounded, shown

WHOLE = 32 << 20
BLOCK = 64 << 10
BLOCKS = 64
TENSOR_SAMPLE = 4 << 10

_SNAPSHOT = re.compile(r"^[0-9a-f]{40}$")
_SHA256 = re.compile(r"^[0-9a-f]{64}$")
_VERSION = 1


def hub_snapshot(path: Path) -> tuple[str, str] | None:
    """`(repo_id, commit)` where `path` is `models--org--name/snapshots/<commit>` of a Hub cache."""
    repository = path.parent.parent.name
    if _SNAPSHOT.match(path.name) and path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/"), path.name
    return None


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that transformers and SGLang load from a model directory, sorted.

    `model.safetensors`, or the shards that the index names; what lies beside them (Mistral's
    `consolidated.safetensors`) is another copy. Errors: `NotFound` (no directory, no such files, a shard that
    is absent), `Corrupt` (the index is none), `Incompatible` where both are there and are not one.
    """
    if not path.is_dir():
        raise NotFound(f"{path} is not a directory")
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if not index.exists():
        if whole.is_file():
            return [whole]
        other = next(path.glob("*.safetensors"), None)
        what = "no safetensors weights"
        if other is not None:
            what = f"{shown(other.name, 80)}, but no model.safetensors and no index of shards"
        raise NotFound(f"{path} has {what}", "convert the model with save_pretrained first")
    named = _indexed(index)
    there = {item.name for item in path.glob("*.safetensors") if item.is_file()}
    if missing := named - there:
        raise NotFound(f"{path}: weights {min(missing)[:120]!r} are missing", "download the model again")
    if whole.name in there - named:
        raise Incompatible(
            f"{path} has model.safetensors and an index of other files: one of them is left over",
            "remove it, or fetch the model again",
            code="geometry",
        )
    return [path / name for name in sorted(named)]


def _indexed(index: Path) -> set[str]:
    """Names of the shards."""
    content = parse_object(read_bounded(index, limit=64 << 20, follow_symlinks=True), str(index))
    weight_map = content.get("weight_map")
    if not (isinstance(weight_map, dict) and weight_map and isinstance(content.get("metadata"), dict)):
        raise Corrupt(f"{index}: no index of weights (weight_map and metadata)", "download the model again")
    return {str(name) for name in weight_map.values()}


def weight_headers(files: Sequence[Path]) -> dict[str, TensorHeader]:
    """All tensors of all files by name (offsets are within their own file)."""
    return {name: tensor for file in files for name, tensor in read_header(file).items()}


def weights_revision(path: Path) -> str:
    """`commit:<40 hex>` for a Hub snapshot, otherwise `fingerprint:<64 hex>`.

    A fingerprint does not depend on the names of directory and files. It is remembered under
    `Settings.cache`, keyed by path, size, mtime and inode; a damaged memory is computed again.
    Errors: as `weight_files` and `read_header`.
    """
    path = path.absolute()
    if snapshot := hub_snapshot(path):
        return f"commit:{snapshot[1]}"
    files = weight_files(path)
    key = [_VERSION, *([str(file), *_state(file)] for file in files)]
    memory = Settings.load().cache / "fingerprints" / f"{hashlib.sha256(str(path).encode()).hexdigest()}.json"
    if (known := _remembered(memory, key)) is not None:
        return f"fingerprint:{known}"
    fingerprint = hashlib.sha256("".join(sorted(_file_digest(file) for file in files)).encode()).hexdigest()
    _remember(memory, key, fingerprint)
    return f"fingerprint:{fingerprint}"


def _state(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _file_digest(path: Path) -> str:
    header = read_header(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            hasher = hashlib.sha256(size.to_bytes(8, "little"))
            for start, end in [(0, size)] if size <= WHOLE else _samples(header, size):
                _update(hasher, file, start, end)
    except PermissionError:
        raise AccessDenied(f"{path} may not be read") from None
    return hasher.hexdigest()


def _samples(header: dict[str, TensorHeader], size: int) -> Iterator[tuple[int, int]]:
    yield 0, min((tensor.start for tensor in header.values()), default=size)
    for tensor in sorted(header.values(), key=lambda item: item.start):
        yield tensor.start, min(tensor.end, tensor.start + TENSOR_SAMPLE)
    for index in range(BLOCKS):
        start = (size - BLOCK) * index // (BLOCKS - 1)
        yield start, start + BLOCK


def _update(hasher: Any, file: BinaryIO, start: int, end: int) -> None:
    file.seek(start)
    while start < end and (block := file.read(min(1 << 20, end - start))):
        hasher.update(block)
        start += len(block)


def _remembered(memory: Path, key: list[Any]) -> str | None:
    try:
        content = parse_object(read_bounded(memory, limit=1 << 20), memory.name)
    except (KvhubError, OSError):
        return None
    known = content.get("fingerprint")
    valid = content.get("key") == key and isinstance(known, str) and _SHA256.match(known)
    return known if valid else None


def _remember(memory: Path, key: list[Any], fingerprint: str) -> None:
    # Only a memory: a read-only or full disk costs the next caller a second, not this one an error.
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=memory.parent)
        try:
            with open(descriptor, "w") as file:  # noqa: PTH123 - a descriptor, not a path
                json.dump({"key": key, "fingerprint": fingerprint}, file)
            Path(temporary).replace(memory)
        finally:
            Path(temporary).unlink(missing_ok=True)
