"""Content-addressed shards: equal weight files of different mappers are one file on disk.

`KVHUB_HOME/blobs/<sha256>` is a hard link to the file in each mapper's directory, so an
artifact stays a plain directory, a blob that only this folder names is garbage, and the
file system does the counting. Where it has no hard links, nothing is shared.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.settings import Settings

if TYPE_CHECKING:
    from kvhub.artifact.manifest import FileEntry


def share(directory: Path, files: Iterable[FileEntry], settings: Settings) -> int:
    """Make the weight files of a stored mapper one with equal ones; returns the bytes that this saved.

    A blob is read and hashed before a file is replaced by it.
    """
    saved = 0
    for entry in _shards(files):
        path, blob = directory / entry.name, blob_path(entry.sha256, settings)
        with suppress(OSError):
            blob.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not blob.exists():
                os.link(path, blob)
            elif not path.samefile(blob):
                if _is(blob, entry):
                    _replace(path, blob)
                    saved += entry.size
                else:  # damaged, or cut short: the mapper's own file takes its place
                    _replace(blob, path)
    return saved


def reuse(staged: Path, entry: FileEntry, settings: Settings) -> bool:
    """Put a listed file that the store has already into `staged`, checked; False where it has not."""
    blob = blob_path(entry.sha256, settings)
    if entry not in list(_shards([entry])) or not blob.is_file():
        return False
    if not _is(blob, entry):
        blob.unlink(missing_ok=True)
        return False
    try:
        os.link(blob, staged / entry.name)
    except OSError:
        return False
    return True


def drop(files: Iterable[FileEntry], settings: Settings) -> None:
    """Forget the shards of a mapper that has just gone, where no other has them; under the store's lock."""
    for entry in _shards(files):
        path = blob_path(entry.sha256, settings)
        with suppress(OSError):
            if path.stat().st_nlink == 1:
                path.unlink()


def delete(directory: Path, settings: Settings) -> None:
    """Delete a directory with the shards that nothing else has then; under the store's lock.

    Killed on the way it leaves blobs with one link, which `kvhub gc` finds. Errors: `OSError`.
    """
    shared = {_key(found) for path in directory.iterdir() if (found := path.lstat()).st_nlink > 1}
    shutil.rmtree(directory)
    folder = settings.home / "blobs"
    for path in folder.iterdir() if shared and folder.is_dir() else ():
        with suppress(OSError):
            found = path.lstat()
            if found.st_nlink == 1 and _key(found) in shared:
                path.unlink()


def _key(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def unreferenced(settings: Settings) -> Iterator[Path]:
    """Blobs that no mapper has any more, and what a killed process left half linked."""
    folder = settings.home / "blobs"
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            with suppress(FileNotFoundError):
                if path.stat().st_nlink == 1 or path.name.startswith("."):
                    yield path


def blob_path(sha256: str, settings: Settings) -> Path:
    """Where a shard of this content is, if it is there."""
    return settings.home / "blobs" / sha256


def _shards(files: Iterable[FileEntry]) -> Iterator[FileEntry]:
    return (entry for entry in files if entry.name.endswith(".safetensors"))


def _is(blob: Path, entry: FileEntry) -> bool:
    if blob.stat().st_size != entry.size:
        return False
    with blob.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


def _replace(path: Path, by: Path) -> None:
    """`path` becomes another name of `by`, in one step."""
    # Among the blobs, where a leftover is swept; inside an artifact it would read as a foreign file.
    blobs = by.parent if by.parent.name == "blobs" else path.parent
    temporary = blobs / f".{uuid.uuid4().hex[:12]}"
    os.link(by, temporary)
    try:
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def frees(directories: Iterable[Path], settings: Settings) -> int:
    """Bytes of the disk that are free once directories, and the blobs that they alone have, are gone."""
    names: Counter[tuple[int, int]] = Counter()
    files: dict[tuple[int, int], os.stat_result] = {}
    for directory in directories:
        for path in directory.rglob("*"):
            with suppress(OSError):
                found = path.lstat()
                if not stat.S_ISDIR(found.st_mode):
                    names[_key(found)] += 1
                    files[_key(found)] = found
    folder = settings.home / "blobs"
    for path in folder.iterdir() if folder.is_dir() else ():
        with suppress(OSError):
            if (key := _key(path.lstat())) in names:
                names[key] += 1
    return sum(512 * found.st_blocks for key, found in files.items() if found.st_nlink <= names[key])
