"""What will be reused for one request, decided once, before any lock is taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvhub.exchange import BLOCK_TOKENS, EXACT, Lineage
from kvhub_sglang.report import Report

if TYPE_CHECKING:
    from kvhub_sglang.decide import Question
    from kvhub_sglang.refusal import Refusal
    from kvhub_sglang.serving import Candidate
    from kvhub_sglang.stage import Found, Stage


@dataclass(frozen=True)
class BlockSource:
    """Where one block of 64 tokens comes from.

    candidate: the mapper to apply, or None for this model's own exact block.
    lineage: of the rows after they are placed here. nbytes: of its payload.
    """

    key: bytes
    candidate: Candidate | None
    lineage: Lineage
    nbytes: int


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
    worst: Lineage = EXACT
    """The most that the lossy namespace admits, for rows of unknown history."""
    dead: bool = False
    """Refused, or a load failed: nothing is promised again."""
    question: Question | None = None
    """What was asked for; None where the request was refused at once."""
    stage: Stage | None = None
    """Where its blocks are read to; None where there is nothing to read, or no longer."""
    staging: bool = False
    """Blocks are looked for or read, here or on another rank."""
    told: Found | None = None
    """What rank 0 found and every rank reads."""
    found_nothing: Refusal | None = None
    """Why nothing is staged although the request goes on with what the device holds."""
    waiting: bool = False
    """Not decided: the stage is not done. The request is not admitted meanwhile."""

    # what the current scheduling pass found and promised, in tokens
    base: int = 0
    """Device match in the request's own namespace."""
    held: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """Slots of the device match."""
    exact_length: int = 0
    """Device match of the same tokens in the exact namespace."""
    exact_node: Any = None
    promised: int = 0
    slots: Tensor | None = None
    """Pool slots filled by the load and not yet in the request's row."""
    found: Found | None = None
    """What was staged, while the request waits for its first tokens to be computed."""
    prefix_until: float = 0.0
    """How long it waits for that (`time.monotonic`); 0: not asked for."""
    observed: bool = False
    """Its prefill was counted in the cost model."""
    noted: int = 0
    """Tokens of the request's row whose lineage is noted."""

    @property
    def reused(self) -> int:
        """Device match plus promise: tokens the request will not compute."""
        return self.base + self.promised

    @property
    def mapped_from(self) -> int:
        """Where rows that the device does not hold in any namespace begin."""
        return max(self.base, self.exact_length)

    def placed(self) -> list[BlockSource]:
        """The blocks from the exchange that the promise consists of, in order."""
        last = -(-self.reused // BLOCK_TOKENS)
        if self.reused <= self.mapped_from:
            return []
        return [self.blocks[i] for i in range(self.mapped_from // BLOCK_TOKENS, last)]

    def become_exact(self) -> None:
        """Back to the request's own namespace; only while it holds nothing in the lossy one."""
        self.lossy, self.salt = False, self.original_salt
        self.blocks = {i: block for i, block in self.blocks.items() if block.candidate is None}

    def covered_to(self, start: int) -> int:
        """End of the contiguous tokens available from `start` through `blocks`."""
        return reach_of(self.blocks, start)

    def exact_to(self, start: int) -> int:
        """End of the contiguous *exact* tokens from `start` through own blocks."""
        return reach_of(self.blocks, start, own=True)


def reach_of(blocks: dict[int, BlockSource], start: int, *, own: bool = False) -> int:
    """End of the contiguous tokens from `start` through `blocks`. own: through own ones alone."""
    index = start // BLOCK_TOKENS
    while index in blocks and not (own and blocks[index].candidate is not None):
        index += 1
    return max(start, index * BLOCK_TOKENS)
