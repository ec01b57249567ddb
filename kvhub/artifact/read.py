"""Read an artifact that anybody may have written: checked before it is used."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from kvhub.artifact.layout import (
    BESIDE,
    CONFIG,
    INDEX,
    MANIFEST,
    MANIFEST_LIMIT,
    SMALL_FILE_LIMIT,
)
from kvhub.artifact.listing import check_listing, weight_shards
from kvhub.artifact.manifest import SCHEMA_VERSION, FileEntry, Manifest
from kvhub.artifact.open import open_tensors
from kvhub.errors import AccessDenied, Corrupt, Incompatible, NotFound
from kvhub.strict_json import first_fault, parse_object, read_bounded

__all__ = ["open_tensors", "read_manifest", "verify_artifact"]


def read_manifest(directory: Path) -> Manifest:
    """The manifest of an artifact, and nothing else of it.

    The file must be the very bytes that `Manifest.to_bytes` gives, so that the digest of the file
    and of what was understood cannot differ. The files that it lists must be exactly an artifact's,
    with the sizes that its geometry asks for.
    Errors: `NotFound`, `AccessDenied`, `Corrupt`, `Incompatible(code="schema")` for a newer version.
    """
    path = directory / MANIFEST
    if not directory.is_dir():
        raise NotFound(f"no such mapper: {directory}", "kvhub list shows what is registered")
    try:
        data = read_bounded(path, limit=MANIFEST_LIMIT)
    except NotFound:
        raise NotFound(
            f"{directory} is not a mapper: it has no {MANIFEST}", "name the directory that kvhub fit wrote"
        ) from None
    content = parse_object(data, MANIFEST)
    version = content.get("schema_version")
    if type(version) is int and version > SCHEMA_VERSION:
        raise Incompatible(
            f"the mapper was made by a newer kvhub (schema {min(version, 10**6)})",
            "upgrade kvhub",
            code="schema",
        )
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        raise Corrupt(f"{MANIFEST}: {first_fault(error)}") from None
    if manifest.to_bytes() != data:
        raise Corrupt(f"{MANIFEST} is not in canonical form, its digest would not be its identity")
    check_listing(manifest)
    return manifest


def verify_artifact(directory: Path, *, deep: bool) -> Manifest:
    """Check what is on disk against the manifest: presence and size, with `deep` also every sha256.

    Nothing may be missing or extra; `evidence.json`, `README.md`, `assets/` and `.gitattributes` may
    stand beside. Symlinks are refused. Errors: those of `read_manifest`.
    """
    manifest = read_manifest(directory)
    listed = {entry.name for entry in manifest.files}
    try:
        names = sorted(path.name for path in directory.iterdir())
    except PermissionError:
        raise AccessDenied(f"{directory} may not be read", "check who owns it") from None
    for name in names:
        if name not in listed | BESIDE:
            raise Corrupt(f"{name[:80]!r} does not belong to the mapper")
        for path in _tree(directory / name):
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and name == "assets")):
                raise Corrupt(f"{str(path.relative_to(directory))[:120]!r} is not a plain file")
    for entry in manifest.files:
        _check_file(directory, entry, deep=deep)
    _check_index(directory, manifest)
    return manifest


def _tree(path: Path) -> Iterator[Path]:
    pending = [path]  # a stack of our own: a hostile depth of directories must not exhaust Python's
    while pending:
        found = pending.pop()
        yield found
        if found.is_dir() and not found.is_symlink():
            pending.extend(sorted(found.iterdir(), reverse=True))


def _check_file(directory: Path, entry: FileEntry, *, deep: bool) -> None:
    path = directory / entry.name
    try:
        size = path.lstat().st_size
    except FileNotFoundError:
        raise Corrupt(f"{entry.name} is missing") from None
    if size != entry.size:
        raise Corrupt(f"{entry.name} is {size} bytes, the manifest says {entry.size}")
    if deep:
        try:
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except PermissionError:
            raise AccessDenied(f"{path} may not be read", "check who owns it") from None
        if found != entry.sha256:
            raise Corrupt(f"{entry.name} was changed: its sha256 is not the manifest's")


def _check_index(directory: Path, manifest: Manifest) -> None:
    parse_object(read_bounded(directory / CONFIG, limit=SMALL_FILE_LIMIT), CONFIG)
    shards = weight_shards(manifest)
    if len(shards) == 1:
        return
    content = parse_object(read_bounded(directory / INDEX, limit=SMALL_FILE_LIMIT), INDEX)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or {json.dumps(name) for name in weight_map.values()} != {
        json.dumps(name) for name in shards
    }:
        raise Corrupt(f"{INDEX} does not name the mapper's files")
