"""`pull`: from the Hub into the store, every byte checked, `ready` last."""

from __future__ import annotations

import errno
import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.layout import EVIDENCE, EVIDENCE_LIMIT, MANIFEST, MANIFEST_LIMIT
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import read_manifest, verify_artifact
from kvhub.catalog import find, record_evidence, record_location, register
from kvhub.errors import AccessDenied, Corrupt, KvhubError, NotFound
from kvhub.hub import client, store
from kvhub.settings import Settings
from kvhub_registry import HubLocation, MapperRow

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from kvhub.evaluation.evidence import Evidence

RESERVE = 64 << 20
"""Bytes of the disk that a pull leaves free."""


@dataclass(frozen=True)
class Remote:
    """A repository at one commit: sizes and git blob ids of its files, None where the Hub does not say."""

    repo_id: str
    commit: str
    sizes: dict[str, int | None]
    blobs: dict[str, str | None]


def pull(repo_id: str, revision: str | None = None, settings: Settings | None = None) -> Path:
    """The artifact directory of the mapper in a Hub repository, fetched and checked.

    revision: branch, tag or commit; the commit behind it is resolved first, and
    everything comes from that one. Only the files that the manifest lists, and
    the evidence, are downloaded. The row turns `ready` last, and only where the
    evidence passes our own gate.
    Errors: `BadInput`, `NotFound`, `AccessDenied`, `Unreachable`, `Corrupt`,
    `Incompatible`, `KvhubError` (disk full); then nothing is left behind.
    """
    return Path(fetch(repo_id, revision, settings).path)


def fetch(repo_id: str, revision: str | None = None, settings: Settings | None = None) -> MapperRow:
    """As `pull`, returning the registry's row."""
    settings = settings or Settings.load()
    client.split(f"{repo_id}@{revision}" if revision else repo_id)
    hub = client.api()
    remote = _resolve(hub, repo_id, revision)
    try:
        with store.staging(settings.mappers) as staged:
            manifest = _manifest(hub, remote, staged)
            final = settings.mappers / manifest.digest
            complete = _is_complete(final, manifest)
            if not complete:
                _check_room(staged, manifest)
            wanted = [] if complete else [entry.name for entry in manifest.files]
            if EVIDENCE in remote.sizes:
                wanted.append(EVIDENCE)
            for name in wanted:
                _download(hub, remote, name, staged)
            shutil.rmtree(staged / ".cache", ignore_errors=True)  # the client's own notes
            evidence = read_evidence(staged, manifest)
            if not complete:
                _check(staged)
            _keep(staged, final, manifest, evidence, remote, settings)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise client.explain(error, repo_id) from error
        kind = AccessDenied if isinstance(error, PermissionError) else KvhubError
        raise kind(
            f"cannot store {repo_id} in {settings.mappers}: {error.strerror}", "check KVHUB_HOME"
        ) from error
    return find(manifest.digest, settings)


def _resolve(hub: HfApi, repo_id: str, revision: str | None) -> Remote:
    info = client.ask(
        repo_id, lambda: hub.model_info(repo_id, revision=revision, files_metadata=True), revision=revision
    )
    if not info.sha:
        raise NotFound(f"{repo_id} has no commit yet")
    siblings = info.siblings or []
    sizes = {sibling.rfilename: sibling.size for sibling in siblings}
    if MANIFEST not in sizes:
        raise NotFound(
            f"{repo_id} is not a mapper: it has no {MANIFEST}", "kvhub push makes such a repository"
        )
    limits = {MANIFEST: MANIFEST_LIMIT, EVIDENCE: EVIDENCE_LIMIT}
    for name, limit in limits.items():
        size = sizes.get(name)
        if name in sizes and (size is None or size > limit):
            raise Corrupt(f"{name} of {repo_id} is larger than {limit} bytes")
    # An LFS file's blob is its pointer: those files are in the manifest, with their sha256.
    blobs = {sibling.rfilename: None if sibling.lfs else sibling.blob_id for sibling in siblings}
    return Remote(repo_id, info.sha, sizes, blobs)


def _manifest(hub: HfApi, remote: Remote, staged: Path) -> Manifest:
    """The manifest alone; the repository must hold what it lists, before anything large is fetched."""
    _download(hub, remote, MANIFEST, staged)
    manifest = read_manifest(staged)
    for entry in manifest.files:
        if entry.name not in remote.sizes:
            raise Corrupt(f"{remote.repo_id} lacks {entry.name}, which its manifest lists")
        size = remote.sizes[entry.name]
        if size is not None and size != entry.size:
            raise Corrupt(f"{entry.name} of {remote.repo_id} is {size} bytes, its manifest says {entry.size}")
    return manifest


def _download(hub: HfApi, remote: Remote, name: str, staged: Path) -> None:
    client.ask(
        remote.repo_id,
        lambda: hub.hf_hub_download(remote.repo_id, name, revision=remote.commit, local_dir=staged),
    )
    if remote.blobs.get(name) and name in (MANIFEST, EVIDENCE):  # no manifest vouches for these two
        data = (staged / name).read_bytes()
        if hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() != remote.blobs[name]:
            raise Corrupt(f"{name} of {remote.repo_id} is not what was committed", "try again")


def _check_room(staged: Path, manifest: Manifest) -> None:
    needed, free = manifest.size + RESERVE, store.free_bytes(staged)
    if needed > free:
        raise KvhubError(
            f"the mapper takes {manifest.size >> 20} MiB, {staged.parent} has {free >> 20} MiB free",
            "make room, or set KVHUB_HOME to another disk; nothing was kept",
        )


def _is_complete(directory: Path, manifest: Manifest) -> bool:
    """Whether the store holds these very bytes already."""
    try:
        return verify_artifact(directory, deep=True).digest == manifest.digest
    except KvhubError:
        return False


def _check(staged: Path) -> None:
    """sha256 of every file; then, where torch is there, names, shapes and values of every tensor."""
    manifest = verify_artifact(staged, deep=True)
    try:
        import torch  # noqa: F401
    except ImportError:
        return  # the same check runs before the mapper is ever applied, which needs torch
    from kvhub.artifact.open import open_tensors

    open_tensors(staged, manifest)


def _keep(
    staged: Path,
    final: Path,
    manifest: Manifest,
    evidence: Evidence | None,
    remote: Remote,
    settings: Settings,
) -> None:
    from kvhub.artifact.evidence import write_evidence
    from kvhub.evaluation.gate import rejudge

    with store.exclusive(settings.mappers):
        # Again, under the lock: another pull of the same mapper may have been first.
        fresh = not _is_complete(final, manifest)
        if fresh:
            if not (staged / "config.json").exists():
                raise Corrupt(
                    f"{final.name[:12]} was damaged in the store meanwhile", "run the command again"
                )
            store.move_in(staged, final)
        try:
            register(final, manifest, settings)
        except BaseException:
            if fresh:  # under the lock, so nobody else relies on it yet
                shutil.rmtree(final, ignore_errors=True)
            raise
        place = HubLocation(repo_id=remote.repo_id, commit=remote.commit, pushed=False)
        record_location(manifest.digest, place, settings)
        evidence = evidence if fresh else _newer(evidence, read_evidence(final, manifest))
        if evidence is None:
            return
        if not fresh:
            write_evidence(final, evidence)
        judged = evidence.model_copy(update={"verdict": rejudge(evidence, manifest)})
        verdict = "passes" if judged.verdict.passed else "does not pass"
        why = f"the evidence of {remote.repo_id}@{remote.commit[:8]} {verdict} the gate"
        record_evidence(manifest, judged, why=why, settings=settings)


def _newer(pulled: Evidence | None, own: Evidence | None) -> Evidence | None:
    """The evidence to keep where the store has some already; None: nothing changes."""
    if pulled is None or (own is not None and own.created >= pulled.created):
        return None
    return pulled
