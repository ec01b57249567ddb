"""Blocks of tensor-parallel servers: each rank leaves its KV heads, a reader takes those it needs.

A model with `total` KV heads on `size` ranks keeps its heads in `parts = min(size, total)`
pieces of consecutive heads; with more ranks than heads a head is held by several of them
and the first publishes it. Piece `part` of `parts` is an ordinary block (own header, own
checksum) with fewer heads, under a key made of the whole block's key, `part` and `parts`.
A block of one piece has the key itself, so servers without tensor parallelism are the
case `parts = 1`, and degrees may differ between writer and reader.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvhub.exchange.base import BlockMissing, Exchange
from kvhub.exchange.block import Block, BlockHeader, Layout, Lineage

if TYPE_CHECKING:
    import torch

_VERSION = b"kvhub-shard-1"


@dataclass(frozen=True)
class HeadSlice:
    """KV heads `[first, first + count)` of a model with `total`."""

    first: int
    count: int
    total: int

    @classmethod
    def everything(cls, total: int) -> HeadSlice:
        return cls(0, total, total)

    @classmethod
    def of_rank(cls, rank: int, size: int, total: int) -> HeadSlice:
        """What SGLang keeps on one of `size` ranks: consecutive heads, or one that others hold too.

        Errors: `ValueError` where neither of `size` and `total` divides the other.
        """
        if not 0 <= rank < size or (total % size and size % total):
            raise ValueError(f"{total} KV heads cannot lie on {size} ranks")
        parts = min(size, total)
        return cls(rank * parts // size * (total // parts), total // parts, total)

    @property
    def parts(self) -> int:
        """In how many pieces of this size the heads lie."""
        return self.total // self.count


def piece_key(key: bytes, part: int, parts: int) -> bytes:
    """Key of one piece of the block `key`."""
    if parts == 1:
        return key
    where = part.to_bytes(4, "little") + parts.to_bytes(4, "little")
    return hashlib.sha256(_VERSION + key + where).digest()


class ShardedExchange:
    """An exchange of whole blocks for one rank, on an exchange of pieces.

    needs: for each model whose blocks are read (by `ModelIdentity.digest`), the heads
    this rank needs of it. mine: the heads of the served model in this rank's pool.
    publishes: False on a rank whose heads another one publishes.
    """

    def __init__(
        self, pieces: Exchange, needs: Mapping[str, HeadSlice], mine: HeadSlice, *, publishes: bool = True
    ) -> None:
        self.pieces = pieces
        self.mine = mine
        self.publishes = publishes
        self._needs = dict(needs)
        self._in_pieces: set[str] = set()
        totals = {mine.total, *(need.total for need in needs.values())}
        splits = {parts for total in totals for parts in range(1, total + 1) if total % parts == 0}
        self._splits = sorted(splits)

    def header(self, key: bytes) -> BlockHeader | None:
        """The header of a block all of whose pieces are there, with one lineage; else None.

        What is in fewer pieces is preferred; the header is that of the first piece.
        """
        return self.headers([key])[0]

    def headers(self, keys: Sequence[bytes]) -> list[BlockHeader | None]:
        """See `Exchange.headers`: two calls of the exchange of pieces for each way to split the heads."""
        return [found[1] if found is not None else None for found in self._find(keys)]

    def get(self, key: bytes, *, model: str, layout: Layout) -> Block:
        """The heads of `needs[model]`, joined from the pieces that hold them; `layout` is theirs."""
        need = self._needs[model]
        if layout.num_kv_heads != need.count:
            raise ValueError(f"{layout} where {need} are needed")
        whole = layout.model_copy(update={"num_kv_heads": need.total})
        if model not in self._in_pieces:  # then its header need not be asked for first
            with contextlib.suppress(BlockMissing):
                block = self.pieces.get(key, model=model, layout=whole)
                return Block(block.header, _join([block], need.first, need.count))
        [found] = self._find([key])
        if found is None:
            raise BlockMissing(key.hex())
        parts, header = found
        if parts > 1:
            self._in_pieces.add(model)
        if need.total % parts:
            raise BlockMissing(f"{key.hex()} in {parts} pieces of {need.total} heads")
        width = need.total // parts
        first, last = need.first // width, (need.first + need.count - 1) // width
        piece = layout.model_copy(update={"num_kv_heads": width})
        blocks = [
            self.pieces.get(piece_key(key, part, parts), model=model, layout=piece)
            for part in range(first, last + 1)
        ]
        if any(block.header.lineage != header.lineage for block in blocks):
            raise BlockMissing(f"{key.hex()}: a piece was replaced meanwhile")
        return Block(blocks[0].header, _join(blocks, need.first - first * width, need.count))

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
        """Leave this rank's piece of a block; `layout` and `payload` are those of its heads."""
        if not self.publishes:
            return False
        part = self.mine.first // self.mine.count
        return self.pieces.put(
            piece_key(key, part, self.mine.parts),
            model=model,
            position=position,
            layout=layout,
            lineage=lineage,
            payload=payload,
        )

    def _find(self, keys: Sequence[bytes]) -> list[tuple[int, BlockHeader] | None]:
        """For each block: in how many pieces it is there, and the header of the first; None: not whole."""
        found: list[tuple[int, BlockHeader] | None] = [None] * len(keys)
        for parts in self._splits:
            absent = [index for index, one in enumerate(found) if one is None]
            first = self.pieces.headers([piece_key(keys[index], 0, parts) for index in absent])
            begun = [(index, one) for index, one in zip(absent, first, strict=True) if one is not None]
            rests = [piece_key(keys[index], part, parts) for index, _ in begun for part in range(1, parts)]
            others = self.pieces.headers(rests) if rests else []
            for number, (index, one) in enumerate(begun):
                rest = others[number * (parts - 1) : (number + 1) * (parts - 1)]
                if all(other is not None and other.lineage == one.lineage for other in rest):
                    found[index] = (parts, one)
        return found


def _join(blocks: list[Block], offset: int, count: int) -> torch.Tensor:
    """Heads `[offset, offset + count)` of pieces side by side: `[layers, 2, 64, count, head_dim]`."""
    import torch

    rows = blocks[0].payload if len(blocks) == 1 else torch.cat([b.payload for b in blocks], dim=3)
    return rows if offset == 0 and rows.shape[3] == count else rows[:, :, :, offset : offset + count]
