"""An exchange in a directory, on tmpfs or disk, shared by the servers of one machine.

Bounded (least recently used blocks go first), checksummed, atomic, private to
its owner. Several processes may use it at once: a block appears whole by rename,
and a reader that loses a race against the eviction sees it as missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import time
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.errors import AccessDenied
from kvhub.exchange.base import BlockCorrupt, BlockMissing
from kvhub.exchange.block import Block, BlockHeader, Layout, Lineage, decode, decode_header, encode

if TYPE_CHECKING:
    import torch

_HEADER_READ = 12 + 64 * 1024
_MEASURE_EVERY = 64
_LEFTOVER_SECONDS = 600.0


class DirectoryExchange:
    """Blocks as files `<first byte of key>/<key>.kv` below `root`.

    max_bytes: what all blocks together may take; the oldest by access go when a
    write would pass it.
    """

    def __init__(self, root: Path, *, max_bytes: int = 4 << 30) -> None:
        self.root = root
        self.max_bytes = max_bytes
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise AccessDenied(
                f"exchange directory {root} is not private to this user",
                "give it mode 0700 and the user that runs the servers, or name another one",
            )
        self._remove_leftovers()
        self._bytes = self._measure()
        self._puts = 0

    def header(self, key: bytes) -> BlockHeader | None:
        try:
            with self._open(key) as file:
                header = decode_header(file.read(_HEADER_READ))[0]
        except (OSError, BlockCorrupt):
            return None
        return header if header.key == key.hex() else None

    def get(self, key: bytes, *, model: str, layout: Layout) -> Block:
        try:
            with self._open(key) as file:
                data = _read(file, _HEADER_READ + layout.nbytes)
                os.utime(file.fileno())
            return decode(data, key, model, layout)
        except FileNotFoundError:
            raise BlockMissing(key.hex()) from None
        except BlockCorrupt:
            with contextlib.suppress(OSError):
                self._path(key).unlink()
            raise

    def put(
        self,
        key: bytes,
        *,
        model: str,
        position: int,
        layout: Layout,
        lineage: Lineage,
        payload: torch.Tensor,
    ) -> bool:
        present = self.header(key)
        if present is not None and present.lineage.hops <= lineage.hops:
            return False
        data = encode(key, model, position, layout, lineage, payload)
        self._puts += 1
        if self._puts % _MEASURE_EVERY == 0:  # other processes write here too
            self._bytes = self._measure()
        if self._bytes + len(data) > self.max_bytes:
            self._evict(len(data))
        path = self._path(key)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.parent.is_symlink():  # what is ours stays below the root
            raise OSError(errno.ELOOP, "a shard directory is a link")
        handle, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
        self._bytes += len(data)
        return True

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.root / name[:2] / f"{name}.kv"

    def _open(self, key: bytes) -> FileIO:
        # without O_NONBLOCK a FIFO under a block's name would hold the caller for ever
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        path = self._path(key)
        shard = os.open(path.parent, flags | os.O_DIRECTORY)  # a link in the shard's place is not followed
        try:
            handle = os.open(path.name, flags, dir_fd=shard)
        finally:
            os.close(shard)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            return FileIO(handle)
        except BaseException:
            os.close(handle)
            raise

    def _scan(self) -> list[tuple[float, int, Path]]:
        """(last access, bytes, path) of every file, leftovers of killed writers included."""
        found = []
        with os.scandir(self.root) as shards:
            for shard in shards:
                if not shard.is_dir(follow_symlinks=False):
                    continue
                with contextlib.suppress(OSError), os.scandir(shard.path) as files:
                    for file in files:
                        with contextlib.suppress(OSError):
                            status = file.stat(follow_symlinks=False)
                            found.append((status.st_mtime, status.st_size, Path(file.path)))
        return found

    def _remove_leftovers(self) -> None:
        """Files that a killed writer never gave a name."""
        long_ago = time.time() - _LEFTOVER_SECONDS
        for changed, _, path in self._scan():
            if changed < long_ago and path.name.startswith(".") and path.suffix == ".part":
                with contextlib.suppress(OSError):
                    path.unlink()

    def _measure(self) -> int:
        return sum(size for _, size, _ in self._scan())

    def _evict(self, incoming: int) -> None:
        """Remove the least recently used blocks until a tenth of the space is free."""
        files = sorted(self._scan())
        total = sum(size for _, size, _ in files)
        goal = self.max_bytes - max(incoming, self.max_bytes // 10)
        for _, size, path in files:
            if total <= goal:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
        self._bytes = total
        if total + incoming > self.max_bytes:
            raise OSError(f"a block of {incoming} bytes does not fit an exchange of {self.max_bytes}")


def _read(file: FileIO, most: int) -> torch.Tensor:
    """The whole file as uint8, read in place; a file longer than a valid block is not read."""
    import torch

    size = os.fstat(file.fileno()).st_size
    if size > most:
        raise BlockCorrupt("the file is too long")
    data = torch.empty(size, dtype=torch.uint8)
    into, filled = memoryview(data.numpy()), 0  # type: ignore[arg-type]
    while filled < size and (count := file.readinto(into[filled:])):
        filled += count
    return data[:filled]
