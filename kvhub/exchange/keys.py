"""Keys of the exchange: a sha256 chain over token ids in a namespace."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvhub.exchange.block import BLOCK_TOKENS

_VERSION = b"kvhub-exchange-1"


def length_prefixed(*parts: bytes) -> bytes:
    """Join parts so that no two different lists of parts give the same bytes."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


@dataclass(frozen=True)
class Namespace:
    """Whose blocks: nothing outside it can be found from inside it.

    model: `ModelIdentity.digest` of the model that computed (or was given) the rows.
    kind: `exact` for rows the model computed on rows it computed; `lossy` for
    everything under which a mapper was applied. The chain of an exact look-up can
    never meet a lossy block.
    tenant: the request's own cache salt and extra key.
    """

    model: str
    kind: Literal["exact", "lossy"]
    tenant: tuple[str, str] = ("", "")

    @property
    def seed(self) -> bytes:
        """First link of the chain, 32 bytes."""
        parts = (self.model, self.kind, *self.tenant)
        return hashlib.sha256(_VERSION + length_prefixed(*(p.encode() for p in parts))).digest()


def chain_keys(namespace: Namespace, token_ids: Sequence[int], *, blocks: int | None = None) -> list[bytes]:
    """One 32-byte key for each full block of `token_ids`, in order.

    Key i depends on every token up to the end of block i, so equal keys mean equal
    prefixes. Only the first `blocks` are computed if given.
    """
    full = len(token_ids) // BLOCK_TOKENS
    full = full if blocks is None else min(full, blocks)
    # array('q') and lists alike; int64 little-endian is part of the format
    tokens = np.asarray(token_ids[: full * BLOCK_TOKENS], dtype="<i8").tobytes()
    keys, link = [], namespace.seed
    for start in range(0, full * BLOCK_TOKENS * 8, BLOCK_TOKENS * 8):
        link = hashlib.sha256(link + tokens[start : start + BLOCK_TOKENS * 8]).digest()
        keys.append(link)
    return keys
