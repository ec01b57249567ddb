"""A block signed by the servers that share a secret, for stores that anybody may write.

    signed block = b"KVHUBTAG" + 24 zero bytes + HMAC-SHA256(secret, head of the block) + block

The head is everything before the payload. It holds the checksum over itself and the
payload, so that signing it signs all, and a header that was read alone can be believed.
"""

from __future__ import annotations

import hashlib
import hmac

from kvhub.exchange.base import BlockCorrupt

PREFIX = 64
"""Bytes before a signed block; a multiple of the alignment of its payload."""

_MAGIC = b"KVHUBTAG" + bytes(24)


def sign(block: bytes, secret: bytes | None) -> bytes:
    """The bytes to store; the block itself where there is no secret."""
    if secret is None:
        return block
    return b"".join((_MAGIC, _tag(block, secret), block))


def unsigned(data: bytes | memoryview, secret: bytes | None) -> int:
    """Where the block begins in `data`, which must hold its head.

    secret: None expects an unsigned block; empty looks for where it would begin without
    believing it. Errors: `BlockCorrupt` where the signature is absent or another's.
    """
    if secret is None:
        return 0
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise BlockCorrupt("the block is not signed")
    if secret and not hmac.compare_digest(
        bytes(data[len(_MAGIC) : PREFIX]), _tag(memoryview(data)[PREFIX:], secret)
    ):
        raise BlockCorrupt("the block is signed with another secret")
    return PREFIX


def _tag(block: bytes | memoryview, secret: bytes) -> bytes:
    head = 12 + int.from_bytes(block[8:12], "little")
    return hmac.digest(secret, bytes(block[:head]), hashlib.sha256)
