"""What killed processes leave unfinished, under every name that kvhub gives to what it is writing.

mappers/    .pull-* beside its lock .pull-*.lock; .removed-*; .fit*, .import-*, .quantize-*; .<digest>.*;
            .writing-*
blobs/      .<12 hex digits>
cache/fits  what a fit writes (`store.fits`)
elsewhere   .writing-<process>-*, .<name>.json.* and, among fingerprints, tmp*
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from kvhub.settings import Settings
from kvhub.store.locks import unheld

PULL = ".pull-"
_SMALL = re.compile(r"\.writing-(?P<process>\d+)-.*|\.[\w-]+\.json\.\w{8}")
_ANONYMOUS = re.compile(r"tmp\w{8}")
_DAY = 86400.0


def small(settings: Settings) -> Iterator[Path]:
    """Small files that were never finished, outside `mappers`, `blobs` and the progress of fits."""
    home, cache = settings.home, settings.cache
    for folder in (home, home / "roots", home / "pulled", home / "serving", cache, cache / "datasets"):
        yield from (path for path in _files(folder) if _is_left(path))
    yield from (path for path in _files(cache / "fingerprints") if _ANONYMOUS.fullmatch(path.name))


def _files(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.is_symlink():
                yield path


def _is_left(path: Path) -> bool:
    found = _SMALL.fullmatch(path.name)
    return found is not None and not written(path)


def written(path: Path) -> bool:
    """Whether a living process is writing this `.writing-<process>-*`: none does so for a day."""
    found = _SMALL.fullmatch(path.name)
    if found is None or found["process"] is None:
        return False
    with suppress(FileNotFoundError):
        if time.time() - path.lstat().st_mtime > _DAY:
            return False  # the number is another process's by now
    try:
        os.kill(int(found["process"]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def of_dead_pull(path: Path) -> AbstractContextManager[bool | None]:
    """Of what a pull has staged: True where its lock is free, kept so until the block ends; False where a
    living pull holds it; None where there is no lock, which says nothing.
    """
    return unheld(path if path.suffix == ".lock" else path.with_suffix(".lock"))


@contextmanager
def abandoned(path: Path, grace: float) -> Iterator[bool]:
    """Whether no living process is at work on a leftover, and none will be until the block ends."""
    old = time.time() - path.lstat().st_mtime >= grace
    if path.name.startswith(PULL):
        with of_dead_pull(path) as dead:
            yield dead is not False and (old or (dead is True and path.suffix != ".lock"))
    else:
        yield path.name.startswith(".removed-") or (old and not written(path))
