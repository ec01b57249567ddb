"""What serving needs of an exchange; a new one is one file that has these methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from kvhub.exchange.block import Block, BlockHeader, Layout, Lineage


class BlockMissing(Exception):
    """The block is not (or no longer) there."""


class BlockCorrupt(Exception):
    """The block is there and cannot be trusted; it is never served."""


class Exchange(Protocol):
    """A bounded store of blocks. Every method may raise OSError; callers then prefill.

    Called from several worker threads at once, never from a scheduler's thread: a method
    may be slow, or hang, and costs the request its reuse, nothing else.
    """

    def header(self, key: bytes) -> BlockHeader | None:
        """The header of a block, or None where there is none (or a damaged one)."""

    def headers(self, keys: Sequence[bytes]) -> list[BlockHeader | None]:
        """`header` of each key, in their order; in as few round trips as the store allows."""

    def get(self, key: bytes, *, model: str, layout: Layout) -> Block:
        """Read and check one block. Raises `BlockMissing` or `BlockCorrupt`."""

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
        """Store one block atomically; False where one of no more hops is there already."""
