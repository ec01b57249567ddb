"""What the target itself expects at some positions: its most likely tokens, and the mass of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KEPT = 128
"""Tokens kept a position. The KL with all others as one is a lower bound, and nearly all of it."""


@dataclass(frozen=True)
class Likely:
    """ids `[positions, n]` int64 and their log-probabilities `[positions, n]` float32."""

    ids: Tensor
    logp: Tensor

    @classmethod
    def of(cls, logits: Tensor, count: int) -> Likely:
        """Of logits `[positions, vocabulary]`."""
        found = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]), dim=-1)
        return cls(found.indices, found.values)

    def divergence(self, logits: Tensor) -> Tensor:
        """Mean over positions of KL(this || softmax of `logits`), nat; differentiable in `logits`."""
        found = logits.float().log_softmax(-1).gather(-1, self.ids)
        rest, other = _remainder(self.logp), _remainder(found)
        likely = (self.logp.exp() * (self.logp - found)).sum(-1)
        return (likely + rest.exp() * (rest - other)).mean()


def _remainder(logp: Tensor) -> Tensor:
    """log(1 - sum exp(logp)), bounded below where hardly anything is left."""
    return torch.log((1 - logp.exp().sum(-1)).clamp(min=1e-6))
