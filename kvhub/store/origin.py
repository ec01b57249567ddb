"""Which evidence came by a pull. All other was measured here, and no pull replaces it.

`KVHUB_HOME/pulled/<digest>` lists the sha256 of each `evidence.json` that a pull has put beside that mapper.
A note that is lost makes evidence ours: then it stays as it is until `kvhub eval`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvhub.files import write_bytes, writing
from kvhub.settings import Settings

_KEPT = 32


def note(digest: str, evidence: bytes, settings: Settings) -> None:
    """Say, before they are put in place, that these bytes are a publisher's. Errors: as `write_bytes`."""
    path = _path(digest, settings)
    with writing(path.parent):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = hashlib.sha256(evidence).hexdigest()
    lines = [*[line for line in _lines(path) if line != found][-_KEPT:], found]
    write_bytes(path, "".join(f"{line}\n" for line in lines).encode())


def came_by_pull(digest: str, evidence: bytes, settings: Settings) -> bool:
    """Whether a pull has put these very bytes beside the mapper."""
    return hashlib.sha256(evidence).hexdigest() in _lines(_path(digest, settings))


def forget(digest: str, settings: Settings) -> None:
    """The mapper is gone, and with it what was noted."""
    _path(digest, settings).unlink(missing_ok=True)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("ascii").split()
    except (FileNotFoundError, UnicodeDecodeError):
        return []


def _path(digest: str, settings: Settings) -> Path:
    return settings.home / "pulled" / digest
