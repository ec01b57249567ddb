"""How many bytes go with a directory of the store."""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from kvhub.settings import Settings


class Links:
    """How many bytes go with a directory, where other mappers may have the same files.

    A file's bytes are free once every name of it is gone: those in directories that go, and the blob's,
    which then goes too. They are counted with the directory that takes the last of the others.
    """

    def __init__(self, settings: Settings) -> None:
        self._blobs = settings.home / "blobs"
        self._gone: Counter[tuple[int, int]] = Counter()
        self._names_of: dict[tuple[int, int], int] = {}
        self._done: set[tuple[int, int]] = set()

    def freed(self, path: Path) -> int:
        """Bytes that are free once `path`, and all that was asked before, is deleted; asked before it is."""
        size = 0
        for key, bytes_ in self._files(path):
            self._gone[key] += 1
            names = self._names_of[key]
            if names - self._gone[key] <= int(names > 1 and key in self._names):
                self._done.add(key)
                size += bytes_
        return size

    def stays(self, path: Path) -> None:
        """Take back `freed`: it is not deleted after all."""
        for key, _ in self._files(path):
            self._gone[key] -= 1
            self._done.discard(key)

    def _files(self, path: Path) -> Iterator[tuple[tuple[int, int], int]]:
        whole = path.is_dir() and not path.is_symlink()
        for item in path.rglob("*") if whole else [path]:
            with suppress(FileNotFoundError):
                found = item.lstat()
                if not stat.S_ISDIR(found.st_mode):
                    key = (found.st_dev, found.st_ino)
                    self._names_of.setdefault(key, found.st_nlink)  # as it was before anything was deleted
                    yield key, found.st_size

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
