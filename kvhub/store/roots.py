"""Lock files that keep mappers: `kvhub lock` leaves a note in KVHUB_HOME of where it wrote one.

The note says what the file named when kvhub last read it. Where the file is missing (another branch is
checked out, a disk is not mounted) the note stands in for it, until a gc has found it missing twice, with the
grace between.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvhub.errors import KvhubError, NotFound
from kvhub.files import write_bytes, writing
from kvhub.hub.lockfile import read_lock
from kvhub.settings import Settings
from kvhub.strict_json import parse_object, read_bounded

GRACE = 3600.0
"""Seconds for which gc leaves alone what may still be wanted; `kvhub gc --grace`."""

_LIMIT = 16 << 20
"""Bytes of a note: the digests of as many mappers as a lock file can hold."""


@dataclass
class Noted:
    """One lock file: where, and the mappers that it names, or named while it was there."""

    note: Path
    path: Path
    digests: list[str] = field(default_factory=list)
    missing: float | None = None
    """Since when a gc has found it missing, in seconds since 1970."""
    there: bool = False

    def expired(self, grace: float) -> bool:
        """Whether it has been missing for `grace` seconds, and keeps nothing any more."""
        now = time.time()
        return not self.there and now - min(now, self.missing or now) >= grace

    def save(self) -> None:
        """Write the note. Errors: as `write_bytes`."""
        content = {"path": str(self.path), "digests": self.digests, "missing": self.missing}
        write_bytes(self.note, json.dumps(content).encode() + b"\n")


def remember(lock: Path, settings: Settings, digests: list[str] | None = None) -> None:
    """Note a lock file, so that `kvhub gc` keeps what it names for as long as it exists.

    digests: what it is going to name; default: what it names. Errors: `AccessDenied`, `KvhubError`.
    """
    folder = settings.home / "roots"
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = lock.absolute()
    if digests is None:
        digests = []
        with suppress(KvhubError):  # the next gc says what is wrong with it
            digests = [entry.digest for entry in read_lock(path).mappers]
    name = hashlib.sha256(str(path).encode()).hexdigest()[:32]
    Noted(folder / f"{name}.json", path, digests).save()


def locked(settings: Settings, grace: float = GRACE) -> dict[str, Path]:
    """Digest and lock file of every mapper that a lock file names; changes nothing.

    grace: seconds for which a missing file counts as it was, see `settle`.
    Errors: `Corrupt` where a lock file cannot be read: then nothing may be collected.
    """
    return {
        digest: noted.path
        for noted in notes(settings)
        if not noted.expired(grace)
        for digest in noted.digests
    }


def notes(settings: Settings) -> Iterator[Noted]:
    """Every lock file that was noted, as it is now. Errors: as `locked`."""
    for note in sorted((settings.home / "roots").glob("*.json")):
        try:
            data = read_bounded(note, limit=_LIMIT)
        except NotFound:
            continue  # another gc has just dropped it
        found = parse_object(data, note.name)
        given, missing = found.get("digests"), found.get("missing")
        noted = Noted(note, Path(str(found.get("path", ""))))
        noted.digests = [str(digest) for digest in given] if isinstance(given, list) else []
        noted.missing = float(missing) if isinstance(missing, int | float) else None
        with suppress(NotFound):
            noted.digests = [entry.digest for entry in read_lock(noted.path).mappers]
            noted.there = True
        yield noted


def settle(settings: Settings, grace: float) -> None:
    """Bring the notes up to date, by a gc that deletes: what files name now, since when one is missing.

    One whose file a gc found missing `grace` seconds ago or more is dropped. On a full disk they stay.
    """
    for noted in notes(settings):
        before = noted.note.read_bytes()
        if noted.expired(grace):
            noted.note.unlink(missing_ok=True)
            continue
        noted.missing = None if noted.there else noted.missing or time.time()
        content = {"path": str(noted.path), "digests": noted.digests, "missing": noted.missing}
        if before != json.dumps(content).encode() + b"\n":
            with suppress(KvhubError):
                noted.save()
