"""A record that stands beside the manifest: read for one digest only, written whole."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, Self, TypeVar

from pydantic import ValidationError

from kvhub.artifact.manifest import Manifest
from kvhub.errors import Corrupt, Incompatible, NotFound
from kvhub.files import write_bytes, writing
from kvhub.strict_json import first_fault, parse_object, read_bounded


class _Bound(Protocol):
    """A record of schema version 1 that names its mapper."""

    mapper: str

    @classmethod
    def model_validate_json(cls, json_data: bytes) -> Self: ...


R = TypeVar("R", bound=_Bound)


def read_beside(
    directory: Path, name: str, manifest: Manifest, kind: type[R], *, limit: int, what: str
) -> R | None:
    """The record `name` beside `manifest`, or None where there is none.

    what: how an error names it, with its verb.
    Errors: `Corrupt` where it is malformed or belongs to another mapper (law 4),
    `Incompatible(code="schema")` where a newer kvhub wrote it.
    """
    try:
        data = read_bounded(directory / name, limit=limit)
    except NotFound:
        return None
    version = parse_object(data, name).get("schema_version")
    if type(version) is int and version > 1:
        raise Incompatible(f"{what} made by a newer kvhub", "upgrade kvhub", code="schema")
    try:
        found = kind.model_validate_json(data)
    except ValidationError as error:
        raise Corrupt(f"{name}: {first_fault(error)}") from None
    if found.mapper != manifest.digest:
        raise Corrupt(f"{name} belongs to another mapper ({found.mapper[:12]})")
    return found


def write_beside(directory: Path, name: str, data: bytes) -> Path:
    """Put a record into an artifact directory, replacing what was there in one step; returns its path.

    Errors: `NotFound`, `AccessDenied`, `KvhubError` (disk full); what was there then remains.
    """
    if not directory.is_dir():
        raise NotFound(f"no such mapper: {directory}", "kvhub list shows what is registered")
    path = directory / name
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    # Outside the artifact until it is whole: a leftover inside would read as a foreign file.
    write_bytes(path, data, by=directory.absolute().parent)
    return path
