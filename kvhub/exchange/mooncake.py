"""An exchange on Mooncake Store, for servers on more than one machine.

kvhub writes no distributed store of its own: this is Mooncake's own client (`pip
install 'kvhub[mooncake]'`, or any of its builds that is there already), over TCP or
RDMA. Storage, replication and eviction are Mooncake's; the bound is that of its
segments, not `max_bytes`.

A page of the store is as hostile as a file: it is checked like a block of the
directory (`kvhub.exchange.block`), and where the servers share a secret it must be
signed by one of them. Mooncake itself knows no users: who reaches its ports reads all
blocks and, without a secret, can write them.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvhub.errors import NotFound, Unreachable
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
from kvhub.exchange.mooncake_url import MooncakeAddress
from kvhub.exchange.signature import PREFIX, sign, unsigned

if TYPE_CHECKING:
    import torch

_FIRST_READ = 1024  # most headers, and less than the smallest block of any model
_HEADER_READ = PREFIX + 12 + MAX_HEADER
# ErrorCode of Mooncake 0.3.13, mooncake-store/include/types.h: not there, not yet there, or going away
_MISSING = frozenset({-703, -704, -707, -710, -712, -714})
_INVALID, _NO_SPACE = -600, -200
_AT_ONCE = 256
"""Headers in one call, so that what a thread keeps registered for them stays at a quarter of a MiB."""
_CONNECT_SECONDS = 5.0


def open_mooncake(url: str) -> MooncakeExchange:
    """Connect to `mooncake://host:port?...` (`MooncakeAddress.parse`).

    Errors: `BadInput` for the URL, `NotFound` where the client is not installed,
    `Unreachable` where the master does not answer.
    """
    return MooncakeExchange(MooncakeAddress.parse(url))


class MooncakeExchange:
    """Blocks as objects `kvhub:<key>`. Safe to use from several threads.

    Calls block for as long as Mooncake's do: seconds where the master is gone, without a
    bound where it hangs. The serving extension calls them off the scheduler's thread.
    """

    def __init__(self, address: MooncakeAddress) -> None:
        self._secret = address.read_secret()
        self._client = _connect(address)
        self._local = threading.local()

    def header(self, key: bytes) -> BlockHeader | None:
        """See `Exchange.header`; two small reads at most, the payload is not moved."""
        return self.headers([key])[0]

    def headers(self, keys: Sequence[bytes]) -> list[BlockHeader | None]:
        """`header` of several keys, in one call of the client for every 256."""
        return [
            header
            for start in range(0, len(keys), _AT_ONCE)
            for header in self._headers(keys[start : start + _AT_ONCE])
        ]

    def _headers(self, keys: Sequence[bytes]) -> list[BlockHeader | None]:
        staging = self._staging(max(_HEADER_READ, len(keys) * _FIRST_READ))
        offsets = [index * _FIRST_READ for index in range(len(keys))]
        sizes = self._read_ranges(staging, keys, offsets, _FIRST_READ)
        heads = [
            bytes(staging.view[o : o + _FIRST_READ]) if size == _FIRST_READ else None
            for o, size in zip(offsets, sizes, strict=True)
        ]
        found: list[BlockHeader | None] = []
        for key, size, head in zip(keys, sizes, heads, strict=True):
            if size in _MISSING:
                found.append(None)
            elif head is None and size != _INVALID:
                raise OSError(errno.EIO, f"the Mooncake store failed with code {size}")
            else:
                found.append(self._header(key, head))
        return found

    def get(self, key: bytes, *, model: str, layout: Layout) -> Block:
        """See `Exchange.get`. A block that fails its checks is removed from the store."""
        import torch

        most = _HEADER_READ + layout.nbytes
        staging = self._staging(most)
        size = self._client.get_into(_name(key), staging.pointer, most)
        if size in _MISSING:
            raise BlockMissing(key.hex())
        try:
            if size == _INVALID and self._client.get_size(_name(key)) > most:
                raise BlockCorrupt("the object is too long")
            if size < 0:
                raise OSError(errno.EIO, f"the Mooncake store failed with code {size}")
            data = torch.frombuffer(bytearray(staging.view[:size]), dtype=torch.uint8)
            start = unsigned(memoryview(data.numpy()), self._secret)  # type: ignore[arg-type]
            return decode(data[start:], key, model, layout)
        except BlockCorrupt:
            self._client.remove(_name(key), True)
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
        """See `Exchange.put`. `OSError` with ENOSPC where the segments are full."""
        present = self.header(key)
        if present is not None and present.lineage.hops <= lineage.hops:
            return False
        data = sign(encode(key, model, position, layout, lineage, payload), self._secret)
        staging = self._staging(len(data))
        staging.view[: len(data)] = data
        # put would leave an object that is there as it is, a worse or a damaged one too
        code = self._client.upsert_from(_name(key), staging.pointer, len(data))
        if code:
            full = code == _NO_SPACE
            raise OSError(errno.ENOSPC if full else errno.EIO, f"Mooncake stored nothing, code {code}")
        return True

    def close(self) -> None:
        """Leave the store. Blocks in other machines' segments stay."""
        self._client.close()

    def _header(self, key: bytes, head: bytes | None) -> BlockHeader | None:
        """The header in `head`, or in a longer read where it ends before the header does."""
        with contextlib.suppress(BlockCorrupt):
            if head is not None and _ends_within(head, unsigned(head, None if self._secret is None else b"")):
                return self._parse(key, head)
            size = self._client.get_size(_name(key))
            if size <= 0:
                return None
            staging = self._staging(_HEADER_READ)
            length = min(size, _HEADER_READ)
            if self._read_ranges(staging, [key], [0], length) == [length]:
                return self._parse(key, bytes(staging.view[:length]))
        return None

    def _parse(self, key: bytes, head: bytes) -> BlockHeader | None:
        start = unsigned(head, self._secret)
        header = decode_header(head[start:])[0]
        return header if header.key == key.hex() else None

    def _read_ranges(
        self, staging: _Staging, keys: Sequence[bytes], offsets: list[int], length: int
    ) -> list[int]:
        count = len(keys)
        found = self._client.get_into_ranges(
            [staging.pointer],
            [[_name(key) for key in keys]],
            [[[offset] for offset in offsets]],
            [[[0]] * count],
            [[[length]] * count],
        )
        return [int(ranges[0]) for ranges in found[0]]

    def _staging(self, size: int) -> _Staging:
        """This thread's registered memory, of `size` bytes at least."""
        staging: _Staging | None = getattr(self._local, "staging", None)
        if staging is None or len(staging.view) < size:
            if staging is not None:
                self._client.unregister_buffer(staging.pointer)
            staging = self._local.staging = _Staging(self._client, size)
        return staging


class _Staging:
    """Memory that the transfer engine may read and write."""

    def __init__(self, client: Any, size: int) -> None:
        import numpy as np

        self._memory = np.zeros(-(-size // 4096) * 4096, dtype=np.uint8)
        self.view = memoryview(self._memory)  # type: ignore[arg-type]
        self.pointer = int(self._memory.ctypes.data)
        if code := client.register_buffer(self.pointer, len(self.view)):
            raise OSError(errno.ENOMEM, f"Mooncake could not register memory, code {code}")


def _ends_within(head: bytes, start: int) -> bool:
    size = int.from_bytes(head[start + 8 : start + 12], "little")
    return start + 12 + size <= len(head)


def _name(key: bytes) -> str:
    return f"kvhub:{key.hex()}"


def _connect(address: MooncakeAddress) -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise NotFound(
            f"Mooncake's client cannot be loaded: {error}",
            "pip install 'kvhub[mooncake]'; on Debian it needs libibverbs1 librdmacm1 libnuma1 liburing2",
        ) from None
    absent = Unreachable(
        f"no Mooncake master at {address.host}:{address.port}",
        "is mooncake_master running there, and is the metadata server the one it names?",
    )
    try:  # the client itself would try for a minute and a half
        socket.create_connection((address.host, address.port), _CONNECT_SECONDS).close()
    except OSError:
        raise absent from None
    client = MooncakeDistributedStore()
    code = client.setup(
        address.local_host(),
        address.metadata,
        address.segment,
        address.buffer,
        address.protocol,
        address.device,
        f"{address.host}:{address.port}",
    )
    if code:
        raise absent
    return client
