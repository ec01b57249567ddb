"""The root of a directory exchange: whose it is, and which files below it are kvhub's.

An exchange removes files when it is full. So it takes a directory only where nothing
else lies, says so with a marker, and later looks at its own files alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from kvhub.errors import AccessDenied, BadInput

MARKER = ".kvhub-exchange"
"""Name of the file that says that a directory is an exchange."""
BLOCK_SUFFIX = ".kv"
PART_PREFIX, PART_SUFFIX = ".", ".part"

_TEXT = "KV blocks of kvhub servers lie here; the oldest are removed when they take too much room.\n"
_SHARD = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"[0-9a-f]{64}" + re.escape(BLOCK_SUFFIX))
_PART = re.compile(re.escape(PART_PREFIX) + r"[a-z0-9_]{8}" + re.escape(PART_SUFFIX))


def check_root(root: Path) -> None:
    """Refuse a directory that an exchange may not use; one that is absent, or empty, may be used.

    Changes nothing. Errors: `BadInput` where it is no directory or holds something that
    is not an exchange's; `AccessDenied` where others may enter it.
    """
    refusal = BadInput(
        f"exchange {root} is not a directory", "name a directory (not a link to one), or a new one"
    )
    try:
        status = root.lstat()
    except FileNotFoundError:
        return
    except NotADirectoryError:  # something above it is a file
        raise refusal from None
    if not stat.S_ISDIR(status.st_mode):
        raise refusal
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise AccessDenied(
            f"exchange directory {root} is not private to this user",
            "give it mode 0700 and the user that runs the servers, or name another one",
        )
    if not is_marked(root) and (foreign := _foreign(root)) is not None:
        raise BadInput(
            f"exchange directory {root} holds something else: {foreign}",
            "name an empty or a new directory: old files are removed from an exchange that is full",
        )


def open_root(root: Path) -> None:
    """Make the directory (mode 0700) where it is absent, check it and mark it.

    Errors: see `check_root`; `AccessDenied` where it cannot be made or written.
    """
    try:
        with contextlib.suppress(FileExistsError, NotADirectoryError):
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_root(root)
        with contextlib.suppress(FileExistsError):
            handle = os.open(root / MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(_TEXT)
    except OSError as error:
        raise AccessDenied(
            f"exchange directory {root} cannot be made or written: {error.strerror or error}",
            "name another directory, or let this user write it",
        ) from error


def is_marked(root: Path) -> bool:
    """Whether the directory is there and says that it is an exchange."""
    try:
        return stat.S_ISREG((root / MARKER).lstat().st_mode)
    except OSError:
        return False


def is_part(name: str) -> bool:
    """Whether a file's name is that of a block being written."""
    return _PART.fullmatch(name) is not None


def own_files(root: Path) -> Iterator[os.DirEntry[str]]:
    """Blocks and unfinished blocks below `root`: regular files with kvhub's names, nothing else."""
    with os.scandir(root) as entries:
        for entry in entries:
            if _is_shard(entry):
                with contextlib.suppress(OSError), os.scandir(entry.path) as files:
                    yield from (file for file in files if _is_own(file, entry.name))


def _foreign(root: Path) -> str | None:
    """The first thing that no exchange has put there; exchanges made before markers have none."""
    with os.scandir(root) as entries:
        for entry in entries:
            if not _is_shard(entry):
                if entry.name != MARKER or not entry.is_file(follow_symlinks=False):
                    return entry.name
                continue
            with contextlib.suppress(FileNotFoundError), os.scandir(entry.path) as files:
                for file in files:
                    if not _is_own(file, entry.name):
                        return f"{entry.name}/{file.name}"
    return None


def _is_shard(entry: os.DirEntry[str]) -> bool:
    return _SHARD.fullmatch(entry.name) is not None and entry.is_dir(follow_symlinks=False)


def _is_own(file: os.DirEntry[str], shard: str) -> bool:
    named = _BLOCK.fullmatch(file.name) is not None and file.name.startswith(shard)
    return (named or is_part(file.name)) and file.is_file(follow_symlinks=False)
