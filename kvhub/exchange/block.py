"""One block: its layout, its lineage, and its bytes, which are hostile until checked."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from kvhub.exchange.base import BlockCorrupt
from kvhub.model.identity import MOST, Record, Sha256, canonical_json

if TYPE_CHECKING:
    import torch

BLOCK_TOKENS = 64
"""Tokens in a block; independent of the page size of any engine."""

_MAGIC = b"KVHUBBLK"
MAX_HEADER = 64 * 1024
_ALIGNMENT = 64
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


class Layout(Record):
    """Shape of a block's payload: `[num_layers, 2 (K, V), 64, num_kv_heads, head_dim]`."""

    num_layers: int = Field(ge=1, le=1024)
    num_kv_heads: int = Field(ge=1, le=1024)
    head_dim: int = Field(ge=2, le=1024)
    dtype: Literal["float32", "bfloat16", "float16"]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, BLOCK_TOKENS, self.num_kv_heads, self.head_dim)

    @property
    def nbytes(self) -> int:
        """Payload bytes of one block."""
        layers, two, tokens, heads, dim = self.shape
        return layers * two * tokens * heads * dim * _ITEMSIZE[self.dtype]


class Lineage(Record):
    """What lies under a block: nothing (exact), or mappers, `hops` deep at most."""

    hops: int = Field(ge=0, le=255)
    mappers: list[Sha256] = Field(max_length=256)

    @property
    def exact(self) -> bool:
        return self.hops == 0

    def then(self, mapper: str) -> Lineage:
        """The lineage after one more mapper was applied."""
        return Lineage(hops=self.hops + 1, mappers=sorted({*self.mappers, mapper}))

    def merge(self, other: Lineage) -> Lineage:
        """The lineage of rows computed on both."""
        return Lineage(hops=max(self.hops, other.hops), mappers=sorted({*self.mappers, *other.mappers}))


EXACT = Lineage(hops=0, mappers=[])


class BlockHeader(Record):
    """What a block says about itself; compared with what the reader expects."""

    key: Sha256
    model: Sha256
    position: int = Field(ge=0, le=MOST, multiple_of=BLOCK_TOKENS)
    """Position of the first token."""
    layout: Layout
    lineage: Lineage
    checksum: Sha256
    """sha256 over the other fields (canonical JSON) and the payload."""


@dataclass(frozen=True)
class Block:
    """A checked block. payload: `Layout.shape`, in the layout's dtype."""

    header: BlockHeader
    payload: torch.Tensor


def encode(
    key: bytes, model: str, position: int, layout: Layout, lineage: Lineage, payload: torch.Tensor
) -> bytes:
    """Bytes of a block; payload must have `layout.shape` and dtype."""
    import torch

    if tuple(payload.shape) != layout.shape or str(payload.dtype) != f"torch.{layout.dtype}":
        raise ValueError(f"payload {tuple(payload.shape)} {payload.dtype} does not fit {layout}")
    raw = payload.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
    fields: dict[str, Any] = {
        "key": key.hex(),
        "model": model,
        "position": position,
        "layout": layout.model_dump(),
        "lineage": lineage.model_dump(),
    }
    header = BlockHeader.model_validate({**fields, "checksum": _checksum(fields, raw)})
    text = canonical_json(header.model_dump(mode="json"))
    text += b" " * (-(12 + len(text)) % _ALIGNMENT)  # so that the payload can be viewed in place
    return b"".join((_MAGIC, len(text).to_bytes(4, "little"), text, raw))


def decode_header(data: bytes | memoryview) -> tuple[BlockHeader, int]:
    """The header and the offset of the payload; `BlockCorrupt` on anything unexpected."""
    if len(data) < 12 or bytes(data[:8]) != _MAGIC:
        raise BlockCorrupt("not a block")
    size = int.from_bytes(data[8:12], "little")
    if size > MAX_HEADER or 12 + size > len(data) or (12 + size) % _ALIGNMENT:
        raise BlockCorrupt("header length out of bounds")
    try:
        header = BlockHeader.model_validate_json(bytes(data[12 : 12 + size]))
    except ValidationError:
        raise BlockCorrupt("header is not valid") from None
    return header, 12 + size


def decode(data: torch.Tensor, key: bytes, model: str, layout: Layout) -> Block:
    """A checked block, or `BlockCorrupt`: wrong key, model, layout, size or checksum.

    data: the file as uint8; the payload is a view of it where alignment allows.
    """
    import torch

    view = memoryview(data.numpy())  # type: ignore[arg-type]
    header, offset = decode_header(view)
    if header.key != key.hex() or header.model != model or header.layout != layout:
        raise BlockCorrupt("block is of another key, model or layout")
    if len(view) - offset != layout.nbytes:
        raise BlockCorrupt("payload has the wrong size")
    if _checksum(header.model_dump(exclude={"checksum"}), view[offset:]) != header.checksum:
        raise BlockCorrupt("checksum differs")
    dtype = getattr(torch, layout.dtype)
    return Block(header, data[offset:].view(dtype).view(layout.shape))


def _checksum(fields: dict[str, Any], payload: bytes | memoryview) -> str:
    digest = hashlib.sha256(canonical_json(fields))
    digest.update(payload)
    return digest.hexdigest()
