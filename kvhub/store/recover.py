"""Mappers whose files are here and whose row is not: back into the registry, judged by their own evidence."""

from __future__ import annotations

import re
from pathlib import Path

from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.read import verify_artifact
from kvhub.catalog import find, inside, is_directory, local_directory, open_registry, register
from kvhub.errors import NotFound
from kvhub.hub.store import exclusive
from kvhub.settings import Settings
from kvhub.store import trust
from kvhub.store.judge import judge
from kvhub.store.strays import look
from kvhub.strict_json import shown
from kvhub_registry import MapperRow

_PREFIX = re.compile(r"[0-9a-f]{6,64}")


def unregistered(settings: Settings) -> list[Path]:
    """Directories in the store that hold a mapper without a row, ordered by digest."""
    if not settings.mappers.is_dir():
        return []
    with open_registry(settings) as registry:
        known = {row.digest for row in registry.list()}
    found = [look(path) for path in sorted(settings.mappers.iterdir()) if path.name not in known]
    return [stray.path for stray in found if stray.kind == "unregistered"]


def directory_named(text: str, settings: Settings) -> Path:
    """The artifact directory that a path or the beginning of a digest names. Errors: `NotFound`."""
    given = local_directory(text)
    if given is None and _PREFIX.fullmatch(text) and settings.mappers.is_dir():
        found = [path for path in settings.mappers.iterdir() if path.name.startswith(text)]
        given = found[0] if len(found) == 1 else None
    if given is None and is_directory(text):
        given = Path(text).absolute()
    if given is None:
        hint = "name a directory, or six digits or more"
        raise NotFound(f"no mapper {shown(text)!r} in {settings.mappers}", hint)
    return given


def put_back(directory: Path, settings: Settings) -> MapperRow:
    """Register an artifact whose every byte is right, with the state that its evidence gives it.

    Repositories, aliases and that it was retired are not known any more where the registry was lost.
    Errors: those of `verify_artifact`, `read_evidence`, `trust.demand` and `register`.
    """
    trust.load(settings)
    manifest = verify_artifact(directory, deep=True)
    trust.demand(directory, manifest, settings)
    settings.mappers.mkdir(mode=0o700, parents=True, exist_ok=True)
    with exclusive(settings.mappers):
        if not directory.is_dir():
            raise NotFound(f"{directory} has just been removed", "kvhub list shows what is registered")
        evidence = read_evidence(directory, manifest)
        stored = settings.mappers / manifest.digest
        place = stored if stored.is_dir() and not inside(directory, settings.mappers) else directory
        register(place, manifest, settings)
        judge(manifest, evidence, settings)
    return find(manifest.digest, settings)
