"""Progress of fits that were never finished: `KVHUB_HOME/cache/fits/<key>`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvhub.fit.progress import FITS, LOCK, is_key, is_progress
from kvhub.settings import Settings
from kvhub.store.locks import unheld

DAYS = 30.0
"""Without a word to its progress a fit is given up after so many days."""

_ASIDE = ".removed-"


@dataclass(frozen=True)
class Unfinished:
    """One directory: bytes on disk, days since anything in it was written, whether a fit runs in it now."""

    path: Path
    size: int
    days: float
    running: bool
    aside: bool = False
    """Half deleted by a gc that was killed."""


def unfinished(settings: Settings) -> Iterator[Unfinished]:
    """Every fit that has progress under `KVHUB_HOME`; what is called otherwise is not ours and left out."""
    folder = settings.cache / FITS
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_dir():
            continue
        aside = path.name.startswith(_ASIDE) and is_key(path.name.removeprefix(_ASIDE))
        with suppress(FileNotFoundError):  # it ends while it is looked at
            if aside or (is_key(path.name) and all(is_progress(item.name) for item in path.iterdir())):
                size, newest = _measured(path)
                with unheld(path / LOCK) as free:
                    pass
                yield Unfinished(path, size, max(0.0, time.time() - newest) / 86400, free is False, aside)


def remove(fit: Unfinished) -> bool:
    """Delete the progress, unless a fit has begun to run in it meanwhile; whether it is gone.

    Put aside first, under the lock: a fit of the same key that begins now makes a directory of its own.
    """
    path = fit.path
    if not fit.aside:
        with unheld(path / LOCK) as free:
            if free is False:
                return False
            aside = path.with_name(f"{_ASIDE}{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        path = aside
    shutil.rmtree(path)
    return True


def _measured(path: Path) -> tuple[int, float]:
    """Bytes below `path`, and the newest time at which anything was written there."""
    size, newest = 0, path.stat().st_mtime
    for folder, _, names in os.walk(path):
        newest = max(newest, Path(folder).stat().st_mtime)
        for name in names:
            if name == LOCK:  # looking opens it
                continue
            with suppress(FileNotFoundError):
                found = (Path(folder) / name).lstat()
                size, newest = size + found.st_size, max(newest, found.st_mtime)
    return size, newest
