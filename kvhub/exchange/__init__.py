"""The exchange: where servers leave finished KV blocks for each other.

A block holds K and V of 64 tokens, all layers, whatever the engine's page size.
Its key is a sha256 chain over token ids, seeded by the identity of the model,
the class (exact or lossy) and the tenant, so that a look-up can only meet what
it is meant to meet.
"""

from kvhub.exchange.base import BlockCorrupt, BlockMissing, Exchange
from kvhub.exchange.block import BLOCK_TOKENS, EXACT, Block, BlockHeader, Layout, Lineage
from kvhub.exchange.directory import DirectoryExchange
from kvhub.exchange.keys import Namespace, chain_keys

__all__ = [
    "BLOCK_TOKENS",
    "EXACT",
    "Block",
    "BlockCorrupt",
    "BlockHeader",
    "BlockMissing",
    "DirectoryExchange",
    "Exchange",
    "Layout",
    "Lineage",
    "Namespace",
    "chain_keys",
]
