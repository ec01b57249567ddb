"""`pull --locked`: exactly what a lock file names, from the store where it is there, else from its commit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import verify_artifact
from kvhub.catalog import explained, files_of, find, open_registry, record_location, register
from kvhub.errors import BadInput, Corrupt, NotFound
from kvhub.hub import client, store
from kvhub.hub.download import Progress
from kvhub.hub.lockfile import ANEW, LockedMapper, read_lock
from kvhub.hub.pull import fetch
from kvhub.settings import Settings
from kvhub.store import roots, trust
from kvhub.store.judge import judge
from kvhub.store.lifecycle import alias_name
from kvhub.strict_json import shown
from kvhub_registry import HubLocation, MapperRow


def pull_locked(
    path: Path, settings: Settings | None = None, *, progress: Progress | None = None
) -> list[MapperRow]:
    """Every mapper of a lock file, checked byte by byte, with the aliases that the lock gives it.

    Errors: those of `fetch`; `Corrupt` where a commit holds another mapper than the lock says, or the lock
    says other things of a mapper's files than its manifest.
    """
    settings = settings or Settings.load()
    lock = read_lock(path)
    for entry in lock.mappers:
        client.split(f"{entry.repo}@{entry.commit}")
        for name in entry.aliases:
            _demand_alias(name, path.name)
    rows = []
    for entry in lock.mappers:
        agrees = partial(_agrees, entry, path.name)
        row = _here(entry, settings, agrees)
        if row is None:
            row = fetch(
                entry.place, entry.commit, settings, expect=entry.digest, check=agrees, progress=progress
            )
        with explained(), open_registry(settings) as registry:
            for name in entry.aliases:
                registry.set_alias(name, entry.digest, f"locked by {path.name}")
        rows.append(find(row.digest, settings))
    roots.remember(path, settings)
    return rows


def _demand_alias(name: str, lock: str) -> None:
    try:
        good = alias_name(name) == name
    except BadInput:
        good = False
    if not good:
        raise BadInput(f"{shown(name, 80)!r} in {lock} is not an alias", "kvhub lock writes the file anew")


def _agrees(entry: LockedMapper, lock: str, manifest: Manifest) -> None:
    """Refuse (`Corrupt`) a lock that contradicts the manifest of the digest that it names."""
    listed, real = ({file.name: file for file in files} for files in (entry.files, manifest.files))
    wrong = sorted(name for name in listed.keys() | real.keys() if listed.get(name) != real.get(name))
    if wrong or len(entry.files) != len(listed):
        name = wrong[0] if wrong else entry.files[0].name
        raise Corrupt(f"{lock}: {name} of mapper {entry.digest[:12]} is not as its manifest has it", ANEW)


def _here(entry: LockedMapper, settings: Settings, agrees: Callable[[Manifest], None]) -> MapperRow | None:
    """The mapper where every byte of it is here already; registered again where only the row was lost."""
    trust.demand_namespace(entry.repo, settings)
    try:
        row = find(entry.digest, settings)
        directory = files_of(row, settings)
    except NotFound:
        directory = settings.mappers / entry.digest
    try:
        manifest = verify_artifact(directory, deep=True)
    except (NotFound, Corrupt):
        return None
    if manifest.digest != entry.digest:
        return None
    agrees(manifest)
    trust.demand(directory, manifest, settings)
    settings.mappers.mkdir(mode=0o700, parents=True, exist_ok=True)
    with store.exclusive(settings.mappers):
        try:
            evidence = read_evidence(directory, manifest)
        except Corrupt:
            return None  # the commit may have it
        if not directory.is_dir():
            return None
        register(directory, manifest, settings)
        row = find(entry.digest, settings)
        if not row.locations:  # a registry was lost; else what was seen is better than a file's word
            place = HubLocation(repo_id=entry.place, commit=entry.commit, pushed=False)
            record_location(entry.digest, place, settings, revision=entry.commit)
        judge(manifest, evidence, settings)
    return find(entry.digest, settings)
