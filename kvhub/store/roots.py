"""Lock files that keep mappers: `kvhub lock` leaves a note in KVHUB_HOME of where it wrote one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from kvhub.files import write_bytes, writing
from kvhub.hub.lockfile import read_lock
from kvhub.settings import Settings
from kvhub.strict_json import parse_object, read_bounded


def remember(lock: Path, settings: Settings) -> None:
    """Note a lock file, so that `kvhub gc` keeps what it names for as long as it exists."""
    folder = settings.home / "roots"
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = str(lock.absolute())
    note = folder / f"{hashlib.sha256(path.encode()).hexdigest()[:32]}.json"
    write_bytes(note, json.dumps({"path": path}).encode() + b"\n")


def locked(settings: Settings) -> dict[str, Path]:
    """Digest and lock file of every mapper that a lock file names; notes of vanished files are dropped.

    Errors: `Corrupt` where a lock file cannot be read: then nothing may be collected.
    """
    found: dict[str, Path] = {}
    for note in sorted((settings.home / "roots").glob("*.json")):
        path = Path(str(parse_object(read_bounded(note, limit=1 << 16), note.name).get("path", "")))
        if not path.is_file():
            note.unlink(missing_ok=True)
            continue
        found |= {entry.digest: path for entry in read_lock(path).mappers}
    return found
