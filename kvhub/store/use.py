"""Which mappers a living process has loaded: `kvhub gc` leaves those alone.

A shared lock on a file per mapper, kept until the process ends however it ends;
the kernel gives it back, so a crash leaves nothing that says "in use".
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvhub.files import is_full
from kvhub.settings import Settings
from kvhub.store.locks import sole

_held: dict[str, int] = {}


def hold(digest: str, settings: Settings | None = None) -> None:
    """Mark a mapper as in use until this process ends. Where nothing can be written, nothing is marked."""
    path = _path(digest, settings or Settings.load())
    if str(path) in _held:
        return
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _held[str(path)] = descriptor


@contextmanager
def unused(digest: str, settings: Settings, *, look: bool = False) -> Iterator[bool]:
    """Whether nobody holds the mapper; where so, nobody can begin to until the block ends.

    look: make no file. Where there is none nobody holds it, and where none can be made nobody can.
    """
    path = _path(digest, settings)
    try:
        if not look:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        create = os.O_RDONLY if look else os.O_RDWR | os.O_CREAT
        descriptor = os.open(path, create | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if is_full(error) or (look and isinstance(error, FileNotFoundError)):
            yield True
            return
        raise
    with sole(descriptor) as free:
        yield free


def _path(digest: str, settings: Settings) -> Path:
    return settings.home / "use" / digest
