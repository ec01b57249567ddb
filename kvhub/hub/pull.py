"""`pull`: from the Hub into the store, every byte checked, `ready` last."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.layout import EVIDENCE, MANIFEST, SIGNATURE
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.open import check_tensors
from kvhub.artifact.read import read_manifest, verify_artifact
from kvhub.catalog import explained, files_of, find, reading_registry
from kvhub.errors import AccessDenied, Corrupt, KvhubError, Unreachable
from kvhub.files import is_denied, is_full
from kvhub.hub import client, store
from kvhub.hub.download import Progress, download_all
from kvhub.hub.keep import is_complete, keep
from kvhub.hub.reference import Reference, parse
from kvhub.hub.remote import Remote, download, resolve
from kvhub.settings import Settings
from kvhub.store import blobs, trust
from kvhub_registry import MapperRow, RegistryError
from kvhub_registry.names import is_digest_prefix

if TYPE_CHECKING:
    from huggingface_hub import HfApi

RESERVE = 64 << 20
"""Bytes of the disk that a pull leaves free."""


def pull(
    reference: str, revision: str | None = None, settings: Settings | None = None, *, subfolder: str = ""
) -> Path:
    """The artifact directory of the mapper at `org/name[/folder][@revision]`, fetched and checked.

    subfolder: its folder where the repository has several, or its digest (six digits or more).
    revision: branch, tag or commit; the commit behind it is resolved first, and
    everything comes from that one. Only the files that the manifest lists, the
    evidence and the signature are downloaded. The row turns `ready` last, and only where the
    evidence passes our own gate. Where the client is offline, what was pulled before is found.
    Errors: `BadInput`, `NotFound`, `AccessDenied`, `Unreachable`, `Corrupt`,
    `Incompatible`, `KvhubError` (disk full); then nothing is left behind.
    """
    return files_of(fetch(reference, revision, settings, subfolder=subfolder), settings)


def fetch(
    reference: str,
    revision: str | None = None,
    settings: Settings | None = None,
    *,
    subfolder: str = "",
    expect: str = "",
    check: Callable[[Manifest], None] | None = None,
    progress: Progress | None = None,
) -> MapperRow:
    """As `pull`, returning the registry's row.

    expect: how the digest must begin; a mapper of another is `Corrupt` before its weights are fetched.
    check: called with the manifest, before they are; may refuse it.
    """
    settings = settings or Settings.load()
    wanted = parse(reference, revision=revision, subfolder=subfolder)
    trust.demand_namespace(wanted.repo_id, settings)
    hub = client.api()
    try:
        remote, digest = resolve(hub, wanted)
    except Unreachable:
        known = here(wanted, settings) if client.offline() else None
        if known is None or not known.digest.startswith(expect):
            raise
        directory = files_of(known, settings)
        trust.demand(directory, read_manifest(directory), settings)
        return known
    expect = expect or digest
    try:
        with store.staging(settings.mappers) as staging:
            staged = staging / remote.reference.subfolder
            manifest = _manifest(hub, remote, staging)
            if not manifest.digest.startswith(expect):
                found = f"{remote.place}@{remote.commit[:8]} holds mapper {manifest.digest[:12]}"
                raise Corrupt(f"{found}, not {expect[:12]}")
            if check is not None:
                check(manifest)
            _beside(hub, remote, staging)
            trust.demand(staged, manifest, settings)
            final = settings.mappers / manifest.digest
            complete = is_complete(final, manifest)
            if not complete:
                _fetch_files(hub, remote, staging, manifest, settings, progress)
            shutil.rmtree(staging / ".cache", ignore_errors=True)  # the client's own notes
            read_evidence(staged, manifest)  # refuses what is malformed or another mapper's
            if not complete:
                _check(staged)
            keep(staged, final, manifest, remote, settings)
    except OSError as error:
        if is_full(error):
            raise client.explain(error, wanted.place) from error
        kind = AccessDenied if is_denied(error) else KvhubError
        raise kind(
            f"cannot store {wanted.place} in {settings.mappers}: {error.strerror}", "check KVHUB_HOME"
        ) from error
    return find(manifest.digest, settings)


def here(reference: Reference, settings: Settings | None = None) -> MapperRow | None:
    """What was pulled or pushed before as this reference, and is still here."""
    settings = settings or Settings.load()
    with explained(), reading_registry(settings) as registry:
        row = registry.at(reference.place, reference.revision)
        if row is None and is_digest_prefix(reference.subfolder):
            try:
                row = registry.get(reference.subfolder)
            except RegistryError:
                return None
            repo = reference.repo_id
            if not any(f"{place.repo_id}/".startswith(f"{repo}/") for place in row.locations):
                return None
    return row if row is not None and files_of(row, settings).is_dir() else None


def _manifest(hub: HfApi, remote: Remote, staging: Path) -> Manifest:
    """The manifest alone; the repository must hold what it lists, before anything large is fetched."""
    download(hub, remote, MANIFEST, staging)
    manifest = read_manifest(staging / remote.reference.subfolder)
    for entry in manifest.files:
        if entry.name not in remote.sizes:
            raise Corrupt(f"{remote.place} lacks {entry.name}, which its manifest lists")
        size = remote.sizes[entry.name]
        if size is not None and size != entry.size:
            raise Corrupt(f"{entry.name} of {remote.place} is {size} bytes, its manifest says {entry.size}")
    return manifest


def _beside(hub: HfApi, remote: Remote, staging: Path) -> None:
    for name in (SIGNATURE, EVIDENCE):
        if name in remote.sizes:
            download(hub, remote, name, staging)


def _fetch_files(
    hub: HfApi,
    remote: Remote,
    staging: Path,
    manifest: Manifest,
    settings: Settings,
    progress: Progress | None,
) -> None:
    """The listed files: shards that another mapper has already are linked, the others fetched."""
    staged = staging / remote.reference.subfolder
    wanted = [entry for entry in manifest.files if not blobs.reuse(staged, entry, settings)]
    size = sum(entry.size for entry in wanted)
    _check_room(settings.mappers, size)
    sizes = {entry.name: entry.size for entry in wanted}
    download_all(hub, remote, sizes, staging, total=manifest.size, progress=progress)


def _check_room(mappers: Path, size: int) -> None:
    free = store.free_bytes(mappers)
    if size + RESERVE > free:
        raise KvhubError(
            f"the mapper takes {size / 1e6:.3g} MB, {mappers} has {free / 1e6:.3g} MB free"
            f" of which {RESERVE / 1e6:.0f} stay so",
            "make room, or set KVHUB_HOME to another disk; nothing was kept",
        )


def _check(staged: Path) -> None:
    """sha256 of every file, and at the same time names, shapes and values of every tensor."""
    manifest = verify_artifact(staged, deep=False)
    with ThreadPoolExecutor(1) as beside:
        tensors = beside.submit(check_tensors, staged, manifest)
        verify_artifact(staged, deep=True)  # its refusal is the one to show
        tensors.result()
