"""Whether a living process holds a lock file: those of pulls, fits and of mappers in use."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def unheld(lock: Path) -> Iterator[bool | None]:
    """True where nobody holds `lock`, and nobody can begin to until the block ends; False where somebody
    does; None where there is no such file, which says nothing.
    """
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    with sole(descriptor) as free:
        yield free


@contextmanager
def sole(descriptor: int) -> Iterator[bool]:
    """As `unheld`, of an open file, which is closed at the end."""
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
