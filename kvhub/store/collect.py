"""`gc`: what nothing keeps any more.

Kept: every mapper that is draft or ready (drafts go with `drafts=True`), and any that an alias
or a lock file names, or that a living process has loaded. A repository name that push and pull
note (`org/name`) is no such alias: the mapper can be fetched again from there.
"""

from __future__ import annotations

import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from kvhub.catalog import files_of, inside, open_registry, remove_locked
from kvhub.errors import KvhubError
from kvhub.hub import store
from kvhub.settings import Settings
from kvhub.store import blobs, roots, use
from kvhub_registry import MapperRow, State

GRACE = 3600.0
"""Seconds for which what no row names may be of a process that has not registered it yet."""

Kind = Literal["mapper", "directory", "leftover", "blob"]
_LEFTOVER: Kind = "leftover"
_DIRECTORY: Kind = "directory"


@dataclass(frozen=True)
class Garbage:
    """One thing that may go, and the bytes that are free then."""

    kind: Kind
    path: Path
    size: int
    why: str
    row: MapperRow | None = None


@dataclass(frozen=True)
class Kept:
    """A mapper that would go, and what keeps it."""

    row: MapperRow
    by: str


@dataclass(frozen=True)
class Collected:
    """What went (or would go), and what stayed although it is retired."""

    garbage: list[Garbage]
    kept: list[Kept]

    @property
    def size(self) -> int:
        """Bytes of all that went."""
        return sum(item.size for item in self.garbage)


def collect(
    settings: Settings | None = None, *, dry_run: bool = False, drafts: bool = False, grace: float = GRACE
) -> Collected:
    """Delete what nothing keeps; with `dry_run` only say what that is.

    grace: seconds, see `GRACE`. A crash on the way leaves nothing that the next call does not find.
    Errors: `Corrupt` for a lock file that cannot be read (nothing is deleted then).
    """
    settings = settings or Settings.load()
    if not settings.mappers.is_dir():
        return Collected([], [])
    if not dry_run:
        store.sweep(settings.mappers)
    with store.exclusive(settings.mappers):
        with open_registry(settings) as registry:
            rows = registry.list()
        locked = roots.locked(settings)
        garbage: list[Garbage] = []
        kept: list[Kept] = []
        links = Links(settings)
        for row in rows:
            if not _may_go(row, settings, drafts, grace):
                continue
            by = _keeper(row, locked)
            with use.unused(row.digest, settings) as free:
                if by or not free:
                    kept.append(Kept(row, by or "a process has it loaded"))
                    continue
                why = f"{row.state.value}: {row.state_reason}"
                directory = files_of(row, settings)
                garbage.append(Garbage("mapper", directory, links.freed(directory), why, row))
                if not dry_run:
                    remove_locked(row, settings)
        gone = {item.path for item in garbage}
        # by digest too: the home may have been moved, or the registry be shared by several machines
        known = {Path(row.path) for row in rows} | {settings.mappers / row.digest for row in rows}
        garbage += _strays(settings, known | gone, links, grace, dry_run)
        garbage += _blobs(settings, links, dry_run)
    return Collected(garbage, kept)


def _may_go(row: MapperRow, settings: Settings, drafts: bool, grace: float) -> bool:
    if not inside(files_of(row, settings), settings.mappers):
        return False  # its files are somebody's own
    if row.state is State.RETIRED:
        return True
    old = time.time() - row.changed.timestamp() > grace
    return drafts and row.state is State.DRAFT and old


def _keeper(row: MapperRow, locked: dict[str, Path]) -> str:
    names = [name for name in row.aliases if "/" not in name]
    if names:
        return "alias " + ", ".join(f"@{name}" for name in names)
    return f"locked by {locked[row.digest]}" if row.digest in locked else ""


def _strays(
    settings: Settings, known: set[Path], links: Links, grace: float, dry_run: bool
) -> Iterator[Garbage]:
    """Directories without a row, and what killed processes left."""
    for path in sorted(settings.mappers.iterdir()):
        if path in known or path.name == ".lock" or path.name.startswith(".pull-"):
            continue
        with suppress(FileNotFoundError):
            if path.name.startswith(".removed-"):
                kind, why = _LEFTOVER, "half deleted"
            elif time.time() - path.lstat().st_mtime < grace:
                continue  # a fit may be about to register it
            elif path.name.startswith("."):
                kind, why = _LEFTOVER, "of a process that was killed"
            else:
                kind, why = _DIRECTORY, "no registered mapper is here"
            yield Garbage(kind, path, links.freed(path), why)
            if not dry_run:
                _delete(path)


def _blobs(settings: Settings, links: Links, dry_run: bool) -> Iterator[Garbage]:
    """Shards that no mapper has; those of a mapper that has just gone go with it, unmentioned."""
    for path in blobs.unreferenced(settings):
        size, counted = path.stat().st_size, links.counted(path)
        if not dry_run:
            path.unlink(missing_ok=True)
        if not counted:
            yield Garbage("blob", path, size, "no mapper has this shard")


class Links:
    """How many bytes go with a directory, where other mappers may have the same files.

    A file's bytes are free once every name of it is gone: those in directories that go, and the blob's,
    which then goes too. They are counted with the directory that takes the last of the others.
    """

    def __init__(self, settings: Settings) -> None:
        self._blobs = settings.home / "blobs"
        self._gone: Counter[tuple[int, int]] = Counter()
        self._done: set[tuple[int, int]] = set()

    def freed(self, path: Path) -> int:
        """Bytes that are free once `path`, and all that was asked before, is deleted."""
        whole = path.is_dir() and not path.is_symlink()
        size = 0
        for item in path.rglob("*") if whole else [path]:
            with suppress(FileNotFoundError):
                found = item.lstat()
                if stat.S_ISDIR(found.st_mode):
                    continue
                key = (found.st_dev, found.st_ino)
                self._gone[key] += 1
                if found.st_nlink - self._gone[key] <= int(found.st_nlink > 1 and key in self._names):
                    self._done.add(key)
                    size += found.st_size
        return size

    def counted(self, path: Path) -> bool:
        """Whether a file's bytes were counted with a directory."""
        found = path.stat()
        return (found.st_dev, found.st_ino) in self._done

    @cached_property
    def _names(self) -> set[tuple[int, int]]:
        names = set()
        if self._blobs.is_dir():
            for path in self._blobs.iterdir():
                with suppress(FileNotFoundError):
                    found = path.stat()
                    names.add((found.st_dev, found.st_ino))
        return names


def _delete(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise KvhubError(f"cannot delete {path}: {error.strerror}", "delete it by hand") from None
