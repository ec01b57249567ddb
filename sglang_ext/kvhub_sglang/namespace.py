"""The lossy namespace (law 1): mapped rows live where no exact look-up can go.

SGLang's radix tree, its stored pages and its KV events are all namespaced by
`cache_salt`; `extra_key` leaves the event hashes equal and may not be used.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

RESERVED = "kvhub:"


def policy_digest(mappers: Iterable[str], max_hops: int) -> str:
    """Names what may lie under a row: the sorted mapper digests and the hop limit."""
    text = "\n".join([*sorted(set(mappers)), str(max_hops)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Salts:
    """Makes and recognises the salts of one process.

    The nonce is random and never leaves the process, so a client that knows every
    public digest still cannot name the namespace.
    """

    def __init__(self, nonce: str = "") -> None:
        self.nonce = nonce or secrets.token_hex(16)

    def lossy(self, policy: str, original: str | None) -> str:
        """The salt of `original`'s lossy rows under one policy; lengths keep it unambiguous."""
        text = original or ""
        return f"{RESERVED}{self.nonce}:{policy}:{len(text)}:{text}"

    def is_lossy(self, salt: str | None) -> bool:
        return bool(salt) and str(salt).startswith(f"{RESERVED}{self.nonce}:")

    def is_reserved(self, salt: str | None) -> bool:
        """True for a client value that imitates a lossy salt."""
        return bool(salt) and str(salt).startswith(RESERVED)

    def harmless(self, salt: str) -> str:
        """Where a forged salt is moved to: a namespace of its own, with nothing lossy in it."""
        return f"client:{self.nonce}:{salt}"
