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
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.errors import KvhubError
from kvhub.exchange.base import BlockCorrupt, BlockMissing
from kvhub.exchange.block import (
    MAX_HEADER,
    Block,
    BlockHeader,
    Layout,
    Lineage,
    decode,
    decode_header,
    encode,
)
from kvhub.exchange.root import (
    BLOCK_SUFFIX,
    PART_PREFIX,
    PART_SUFFIX,
    is_marked,
    is_part,
    open_root,
    own_files,
)
from kvhub.files import is_full

if TYPE_CHECKING:
    import torch

_HEADER_READ = 12 + MAX_HEADER
_MEASURE_EVERY = 64
_LEFTOVER_SECONDS = 600.0


class DirectoryExchange:
    """Blocks as files `<first byte of key>/<key>.kv` below `root`, which is made where it is absent.

    max_bytes: what all blocks together may take; the oldest by access go when a
    write would pass it. Files that are not blocks are neither counted nor removed.
    Errors: `BadInput` and `AccessDenied`, see `check_root`.
    """

    def __init__(self, root: Path, *, max_bytes: int = 4 << 30) -> None:
        self.root = root
        self.max_bytes = max_bytes
        open_root(root)
        self._remove_leftovers()
        self._bytes = self._measure()
        self._puts = 0

    def header(self, key: bytes) -> BlockHeader | None:
        try:
            with self._open(key) as file:
                header = decode_header(file.read(_HEADER_READ))[0]
        except BlockCorrupt:
            return None
        except OSError:
            if not self.root.is_dir():  # nothing can be said of the block
                raise FileNotFoundError(errno.ENOENT, "the directory is gone") from None
            return None
        return header if header.key == key.hex() else None

    def headers(self, keys: Sequence[bytes]) -> list[BlockHeader | None]:
        return [self.header(key) for key in keys]

    def get(self, key: bytes, *, model: str, layout: Layout) -> Block:
        try:
            with self._open(key) as file:
                data = _read(file, _HEADER_READ + layout.nbytes)
                with contextlib.suppress(OSError):  # on a disk that became read-only blocks are as good
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
        self._come_back()
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
        try:
            _write(path, data)
        except OSError as error:
            if not is_full(error):
                raise
            self._evict(len(data), full=True)  # the disk ends before our own bound
            _write(path, data)
        self._bytes += len(data)
        return True

    def _come_back(self) -> None:
        """Make the directory again where it was removed while in use."""
        if is_marked(self.root):
            return
        try:
            open_root(self.root)
        except KvhubError as error:
            raise OSError(errno.EACCES, error.message) from None
        self._bytes = self._measure()

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.root / name[:2] / f"{name}{BLOCK_SUFFIX}"

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
        """(last access, bytes, path) of every block, leftovers of killed writers included."""
        found = []
        for file in own_files(self.root):
            with contextlib.suppress(OSError):
                status = file.stat(follow_symlinks=False)
                found.append((status.st_mtime, status.st_size, Path(file.path)))
        return found

    def _remove_leftovers(self) -> None:
        """Files that a killed writer never gave a name."""
        long_ago = time.time() - _LEFTOVER_SECONDS
        for changed, _, path in self._scan():
            if changed < long_ago and is_part(path.name):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _measure(self) -> int:
        return sum(size for _, size, _ in self._scan())

    def _evict(self, incoming: int, *, full: bool = False) -> None:
        """Remove the least recently used blocks until a tenth of the space is free.

        full: the disk is, so that what is here now is all that it holds.
        """
        files = sorted(self._scan())
        total = sum(size for _, size, _ in files)
        most = min(total, self.max_bytes) if full else self.max_bytes
        goal = most - max(incoming, most // 10)
        for _, size, path in files:
            if total <= goal:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
        self._bytes = total
        if total + incoming > self.max_bytes:
            raise OSError(f"a block of {incoming} bytes does not fit an exchange of {self.max_bytes}")


def _write(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=PART_PREFIX, suffix=PART_SUFFIX, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


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
