"""A SQLite file that may only be read: somebody else's home, a read-only mount, a snapshot."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote


def read_only_address(path: Path) -> str:
    """The URI that opens a database for reading alone.

    In WAL mode SQLite makes two files beside the database even to read it. Where it cannot, and no other
    process has left its own there, the file is opened as immutable: nobody can be writing it from here.
    """
    still = "&immutable=1" if not may_write(path.parent) and not _has_log(path) else ""
    return f"file:{quote(path.as_posix())}?mode=ro{still}"


def may_write(directory: Path) -> bool:
    """Whether files can be made in a directory (also false for root, on a read-only file system)."""
    return os.access(directory, os.W_OK)


def _has_log(path: Path) -> bool:
    """Whether there is a write-ahead log with something in it."""
    try:
        return path.with_name(path.name + "-wal").stat().st_size > 0
    except OSError:
        return False
