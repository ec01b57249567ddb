"""A SQLite file that may only be read: somebody else's home, a read-only mount, a snapshot."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote


def read_only_address(path: Path) -> str:
    """The URI that opens a database for reading alone.

    In WAL mode SQLite makes two files beside the database even to read it. Where it cannot (also on a full
    disk), and no other process has left its own there, the file is opened as immutable: nobody can be
    writing it from here.
    """
    may_log = may_write(path.parent) and has_room(path.parent)
    still = "" if may_log or _has_log(path) else "&immutable=1"
    return f"file:{quote(os.fsencode(path))}?mode=ro{still}"


def may_write(directory: Path) -> bool:
    """Whether files can be made in a directory (also false for root, on a read-only file system)."""
    return os.access(directory, os.W_OK)


def has_room(directory: Path) -> bool:
    """Whether a disk has place for SQLite's log and the log's index; True where that is not known."""
    try:
        return free_bytes(directory) >= 1 << 18
    except OSError:
        return True


def free_bytes(directory: Path) -> int:
    """Bytes that this user may still write on a disk. Errors: `OSError`."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _has_log(path: Path) -> bool:
    """Whether there is a write-ahead log with something in it."""
    try:
        return path.with_name(path.name + "-wal").stat().st_size > 0
    except OSError:
        return False
