"""The local store of pulled mappers: staged beside it, then moved in by one rename."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from kvhub.files import unwritable

_STAGED = ".pull-"


@contextmanager
def staging(store: Path) -> Iterator[Path]:
    """A fresh directory in `store`, removed at the end unless it was moved away.

    What a killed process left is removed at the next call: its lock is free.
    """
    try:
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(store, error, "set KVHUB_HOME") from None
    sweep(store)
    directory = store / f"{_STAGED}{uuid.uuid4().hex[:12]}"
    lock = FileLock(_lock_path(directory))
    with lock:
        try:
            directory.mkdir(mode=0o700)
            yield directory
        finally:
            for _ in range(20):  # a download that is still ending may write once more while this removes
                shutil.rmtree(directory, ignore_errors=True)
                if not directory.exists():
                    break
                time.sleep(0.05)
            if not directory.exists():  # else it is swept next time
                _lock_path(directory).unlink(missing_ok=True)


@contextmanager
def exclusive(store: Path) -> Iterator[None]:
    """One process at a time changes which mappers are in the store."""
    with FileLock(store / ".lock"):
        yield


def move_in(staged: Path, final: Path) -> None:
    """Make a complete, verified directory appear under its name, on disk before it is visible.

    A damaged directory of that name is replaced. The caller holds `exclusive`.
    """
    for path in sorted(staged.rglob("*")):
        _sync(path)
    staged.chmod(0o755)
    _sync(staged)
    if final.exists():
        shutil.rmtree(aside(final), ignore_errors=True)
        final.rename(aside(final))
        staged.rename(final)
        shutil.rmtree(aside(final), ignore_errors=True)
    else:
        staged.rename(final)
    _sync(final.parent)


def aside(final: Path) -> Path:
    """Where a directory is while another takes its place; what a killed process left there is rubbish."""
    return final.with_name(f".removed-{final.name}")


def wherever(final: Path) -> Path:
    """`final`, or where a removal that was killed has left it."""
    return final if final.exists() else aside(final)


def free_bytes(directory: Path) -> int:
    """Bytes that may still be written where `directory` is."""
    return shutil.disk_usage(directory).free


def sweep(store: Path) -> None:
    """Remove what killed and interrupted pulls left; the lock of a living one is held."""
    # A directory is made only under its lock, so one without it is a dead one's, too.
    for directory in {path.with_suffix("") for path in store.glob(f"{_STAGED}*")}:
        lock_path = _lock_path(directory)
        try:
            with FileLock(lock_path, timeout=0):
                shutil.rmtree(directory, ignore_errors=True)
                if not directory.exists():
                    lock_path.unlink(missing_ok=True)
        except (Timeout, OSError):
            continue  # alive, or another process sweeps it


def _lock_path(directory: Path) -> Path:
    return directory.with_suffix(".lock")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
