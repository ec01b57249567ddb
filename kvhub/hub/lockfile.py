"""`kvhub.lock`: which mappers a project uses, by repository, commit and digest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from kvhub.artifact.manifest import FileEntry, Manifest
from kvhub.errors import BadInput, Corrupt, Incompatible
from kvhub.files import write_output
from kvhub.hub.reference import Reference, is_folder, parse
from kvhub.model.identity import Record, Sha256, Text
from kvhub.strict_json import first_fault, parse_object, read_bounded
from kvhub_registry import MapperRow

LOCK = "kvhub.lock"
LOCK_LIMIT = 16 << 20
VERSION = 1
ANEW = "take the file from where it came again; kvhub lock writes it anew"

RepoId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}$")]


class LockedMapper(Record):
    """One mapper at one commit; `files` are for readers without the registry."""

    digest: Sha256
    repo: RepoId
    folder: str = ""
    """Where in the repository; "" at its root."""
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    source: Text
    target: Text
    aliases: list[Text] = Field(default_factory=list)
    files: list[FileEntry]

    @field_validator("folder")
    @classmethod
    def _a_folder(cls, value: str) -> str:
        if not is_folder(value):
            raise ValueError("is not a folder of a repository")
        return value

    @property
    def place(self) -> str:
        """`org/name[/folder]`."""
        return Reference(self.repo, self.folder).place


class Lock(Record):
    """The whole file; mappers ordered by digest, each once."""

    version: Literal[1] = 1
    mappers: list[LockedMapper]

    @model_validator(mode="after")
    def _once(self) -> Self:
        digests = [entry.digest for entry in self.mappers]
        if sorted(set(digests)) != digests:
            raise ValueError("mappers must be ordered by digest, each once")
        return self

    def to_bytes(self) -> bytes:
        """The bytes of the file: indented, sorted, so that a diff of it reads well."""
        return (json.dumps(self.model_dump(mode="json"), indent=2, sort_keys=True) + "\n").encode()


def make_lock(found: Sequence[tuple[MapperRow, Manifest]]) -> Lock:
    """A lock of registered mappers. Errors: `BadInput` for one that is not on the Hub."""
    entries = {}
    for row, manifest in found:
        if not row.locations:
            raise BadInput(
                f"mapper {row.digest[:12]} is on no Hub, so nobody else could fetch it",
                f"kvhub push {row.digest[:12]} ORG/NAME",
            )
        place = row.locations[-1]
        found_at = parse(place.repo_id)
        entries[row.digest] = LockedMapper(
            digest=row.digest,
            repo=found_at.repo_id,
            folder=found_at.subfolder,
            commit=place.commit,
            source=row.source.name,
            target=row.target.name,
            aliases=[name for name in row.aliases if "/" not in name],
            files=manifest.files,
        )
    return Lock(mappers=[entries[digest] for digest in sorted(entries)])


def read_lock(path: Path) -> Lock:
    """Read a lock file strictly. Errors: `NotFound`, `Corrupt`, `Incompatible` for a newer one."""
    try:
        data = read_bounded(path, limit=LOCK_LIMIT)
        version = parse_object(data, path.name).get("version")
        if type(version) is int and version > VERSION:
            raise Incompatible(f"{path} was written by a newer kvhub", "upgrade kvhub", code="schema")
        return Lock.model_validate_json(data)
    except ValidationError as error:
        raise Corrupt(f"{path.name}: {first_fault(error)}", ANEW) from None
    except Corrupt as error:
        error.hint = error.hint or ANEW
        raise


def write_lock(path: Path, lock: Lock) -> None:
    """Write whole or not at all. Errors: those of `write_output`."""
    write_output(path, lock.to_bytes())
