"""What will be reused for one request, decided once, before any lock is taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvhub.exchange import BLOCK_TOKENS, Lineage
from kvhub_sglang.report import Report

if TYPE_CHECKING:
    from kvhub_sglang.serving import Candidate


@dataclass(frozen=True)
class BlockSource:
    """Where one block of 64 tokens comes from.

    candidate: the mapper to apply, or None for this model's own exact block.
    lineage: of the rows after they are placed here.
    """

    key: bytes
    candidate: Candidate | None
    lineage: Lineage


@dataclass
class Plan:
    """One request's reuse. Attached to SGLang's `Req` from its first match to its release."""

    original_salt: str | None
    salt: str | None
    """The salt the request lives under; the original one unless `lossy`."""
    tenant: tuple[str, str]
    report: Report
    lossy: bool = False
    blocks: dict[int, BlockSource] = field(default_factory=dict)
    """By block index; blocks that the device held at the decision are absent."""
    keys: list[bytes] = field(default_factory=list)
    """The request's own chain in the lossy class, for the tokens that may be reused."""
    policy_lineage: Lineage = field(default_factory=lambda: Lineage(hops=0, mappers=[]))
    """The worst that the namespace admits, for device rows of unknown history."""
    dead: bool = False
    """A load failed: nothing is promised again."""

    # state of the current scheduling pass
    base: int = 0
    promised: int = 0
    exact_length: int = 0
    exact_node: Any = None
    reused: int = 0
    """Device match plus promise: tokens the request will not compute."""
    slots: Any = None
    """Pool slots filled by the load and not yet in the request's row."""

    def covered_to(self, start: int) -> int:
        """End of the contiguous tokens available from `start` through `blocks`."""
        index = start // BLOCK_TOKENS
        while index in self.blocks:
            index += 1
        return max(start, index * BLOCK_TOKENS)

    def exact_to(self, start: int) -> int:
        """End of the contiguous *exact* tokens from `start` through own blocks."""
        index = start // BLOCK_TOKENS
        while index in self.blocks and self.blocks[index].candidate is None:
            index += 1
        return max(start, index * BLOCK_TOKENS)
