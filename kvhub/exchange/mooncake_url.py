"""Where a Mooncake store is, as one URL, so that it fits where a directory does."""

from __future__ import annotations

import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from kvhub.errors import AccessDenied, BadInput, NotFound, Unreachable

SCHEME = "mooncake"
_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_EXAMPLE = "for example mooncake://10.0.0.1:50051?metadata=http://10.0.0.1:8080/metadata"
_SECRET_BYTES = range(32, 4097)


@dataclass(frozen=True)
class MooncakeAddress:
    """One client's view of a store.

    host, port: of the master. metadata: Mooncake's metadata server, or `P2PHANDSHAKE`.
    local: the address under which other machines reach this one; empty: the one that
    reaches the master. segment: bytes of this process's memory that it adds to the
    store. buffer: bytes of the client's own buffer. secret: file shared by the servers.
    """

    host: str
    port: int
    metadata: str = "P2PHANDSHAKE"
    local: str = ""
    protocol: str = "tcp"
    device: str = ""
    segment: int = 0
    buffer: int = 16 << 20
    secret: str = ""

    @classmethod
    def parse(cls, url: str) -> MooncakeAddress:
        """`mooncake://host:port?metadata=&local=&protocol=&device=&segment=4GiB&buffer=&secret=FILE`.

        Errors: `BadInput`.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
            pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        except ValueError as error:
            raise BadInput(f"exchange {url!r}: {error}", _EXAMPLE) from None
        if parts.scheme != SCHEME or not host or not port or parts.path.strip("/") or parts.username:
            raise BadInput(f"exchange {url!r} is not mooncake://host:port?...", _EXAMPLE)
        options = dict(pairs)
        unknown = set(options) - {"metadata", "local", "protocol", "device", "segment", "buffer", "secret"}
        if unknown or len(options) < len(pairs):
            raise BadInput(f"exchange {url!r}: {sorted(unknown) or 'a repeated'} option", _EXAMPLE)
        sizes = {name: _bytes(url, options.pop(name)) for name in ("segment", "buffer") if name in options}
        return cls(host, port, **options, **sizes)  # type: ignore[arg-type]

    def local_host(self) -> str:
        """The address of this machine for the others. Errors: `Unreachable`."""
        if self.local:
            return self.local
        try:
            family, _, _, _, where = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(where)  # chooses a route; nothing is sent
                return str(probe.getsockname()[0])
        except OSError as error:
            raise Unreachable(f"no route to the Mooncake master {self.host}: {error.strerror}") from None

    def read_secret(self) -> bytes | None:
        """The shared secret, or None. Errors: `NotFound`, `AccessDenied`, `BadInput`."""
        if not self.secret:
            return None
        path = Path(self.secret)
        try:
            status = path.stat()
            data = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        except OSError as error:
            raise NotFound(f"cannot read the exchange secret {path}: {error.strerror}") from None
        if status.st_mode & 0o077:
            raise AccessDenied(f"the exchange secret {path} can be read by others", "chmod 600")
        if len(data) not in _SECRET_BYTES:
            raise BadInput(f"the exchange secret {path} has {len(data)} bytes", "32 random bytes or more")
        return data


def _bytes(url: str, text: str) -> int:
    found = re.fullmatch(r"(\d{1,15})\s*([kmgt]ib)?", text.strip().lower())
    if not found:
        raise BadInput(f"exchange {url!r}: {text!r} is no size", "a number of bytes, MiB or GiB")
    return int(found[1]) * _UNITS[found[2] or ""]
