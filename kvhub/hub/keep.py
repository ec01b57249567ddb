"""The last step of a pull: what was fetched and checked becomes the store's, without loss of what is here.

Evidence that was measured here is never replaced by a publisher's: whoever publishes could date theirs in
the year 2099, and a mapper that failed on our text would serve.
"""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

from kvhub.artifact.beside import write_beside
from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.layout import EVIDENCE, EVIDENCE_LIMIT, SIGNATURE
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import verify_artifact
from kvhub.catalog import record_location
from kvhub.errors import Corrupt, KvhubError, NotFound
from kvhub.evaluation.evidence import Evidence
from kvhub.hub import store
from kvhub.hub.remote import Remote
from kvhub.settings import Settings
from kvhub.store import origin, trust
from kvhub.store.entry import enter
from kvhub.store.judge import judge
from kvhub.strict_json import read_bounded
from kvhub_registry import HubLocation

SKEW = timedelta(days=1)
"""How far a publisher's clock may be ahead of ours."""


def keep(staged: Path, final: Path, manifest: Manifest, remote: Remote, settings: Settings) -> None:
    """Move a checked artifact to its place, register it and judge the evidence that then stands there.

    Where the place holds these bytes already, only evidence and signature are taken from `staged`. Killed at
    any point, the same pull again ends with the same state. Errors: `Corrupt`; those of `register`.
    """
    with store.exclusive(settings.mappers):
        # Again, under the lock: another pull of the same mapper may have been first.
        fresh = not is_complete(final, manifest)
        if fresh and not (staged / "config.json").exists():
            if not final.exists():  # kvhub rm or gc was quicker
                raise NotFound(f"{final.name[:12]} was removed from the store meanwhile", "pull again")
            raise Corrupt(f"{final.name[:12]} was damaged in the store meanwhile", "run the command again")
        # A pull that was killed while it replaced a damaged directory has left that aside.
        before = final if final.exists() else store.aside(final)
        here, theirs = _evidence(before, manifest), _evidence(staged, manifest)
        taken = theirs is not None and (here is None or _newer(theirs, here, manifest, settings))
        if taken and theirs is not None:
            origin.note(manifest.digest, theirs[1], settings)
        if fresh:
            _carry(before, staged, manifest, None if taken or here is None else here[1])
            store.move_in(staged, final)
        else:
            if taken and theirs is not None and (here is None or here[1] != theirs[1]):
                write_beside(final, EVIDENCE, theirs[1])
            _signature(staged, final, manifest)
        enter(final, manifest, settings, fresh=fresh)
        place = HubLocation(repo_id=remote.place, commit=remote.commit, pushed=False)
        record_location(manifest.digest, place, settings, revision=remote.reference.revision)
        kept = theirs if taken else here
        why = f"the evidence of {remote.place}@{remote.commit[:8]}" if taken else ""
        judge(manifest, kept[0] if kept else None, settings, why=why)
        if kept is None and (final / EVIDENCE).exists():
            raise Corrupt(
                f"{EVIDENCE} of mapper {manifest.digest[:12]} is damaged, and {remote.place} has none",
                "kvhub eval measures it again",
            )


def is_complete(directory: Path, manifest: Manifest) -> bool:
    """Whether the store holds these very bytes already."""
    try:
        return verify_artifact(directory, deep=True).digest == manifest.digest
    except KvhubError:
        return False


def _evidence(directory: Path, manifest: Manifest) -> tuple[Evidence, bytes] | None:
    """Evidence of this mapper with its bytes; None where there is none, or what is there is damaged."""
    try:
        found = read_evidence(directory, manifest)
    except Corrupt:
        return None
    return None if found is None else (found, read_bounded(directory / EVIDENCE, limit=EVIDENCE_LIMIT))


def _newer(
    theirs: tuple[Evidence, bytes], here: tuple[Evidence, bytes], manifest: Manifest, settings: Settings
) -> bool:
    """Whether a publisher's evidence replaces what is here, which must have come by a pull, too."""
    if not origin.came_by_pull(manifest.digest, here[1], settings):
        return False
    return _made(theirs[0]) > _made(here[0])


def _made(evidence: Evidence) -> datetime:
    """When it says that it was measured; a date that is none, or is yet to come, is before all others."""
    try:
        made = datetime.fromisoformat(evidence.created)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    made = made if made.tzinfo else made.replace(tzinfo=UTC)
    return made if made <= datetime.now(UTC) + SKEW else datetime.min.replace(tzinfo=UTC)


def _carry(before: Path, staged: Path, manifest: Manifest, evidence: bytes | None) -> None:
    """What was made here beside a mapper whose files are replaced: evidence, diagnostics, a signature."""
    if evidence is not None:
        write_beside(staged, EVIDENCE, evidence)
    assets, signature = before / "assets", before / SIGNATURE
    if assets.is_dir() and not assets.is_symlink():
        try:
            shutil.copytree(assets, staged / "assets", symlinks=True)
            verify_artifact(staged, deep=False)
        except (OSError, KvhubError):  # they may be what was damaged
            shutil.rmtree(staged / "assets", ignore_errors=True)
    if not (staged / SIGNATURE).exists() and signature.is_file() and not signature.is_symlink():
        shutil.copyfile(signature, staged / SIGNATURE)
        _drop_if_wrong(staged, manifest)


def _signature(staged: Path, final: Path, manifest: Manifest) -> None:
    if (staged / SIGNATURE).exists():
        (staged / SIGNATURE).replace(final / SIGNATURE)
    elif (final / SIGNATURE).exists():
        _drop_if_wrong(final, manifest)


def _drop_if_wrong(directory: Path, manifest: Manifest) -> None:
    """A signature that is damaged says nothing, and the repository has none."""
    try:
        trust.provenance(directory, manifest, trust.Policy())
    except Corrupt:
        (directory / SIGNATURE).unlink()
