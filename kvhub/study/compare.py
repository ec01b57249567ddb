"""Compare an arm's logits with native ones, the native side prepared once."""

from __future__ import annotations

import torch
from torch import Tensor

from kvhub.errors import Corrupt
from kvhub.evaluation.metrics import LogitSums


class Native:
    """`kvhub.evaluation.metrics.compare_logits` with float32 passes and float64 sums: five times as fast.

    Tested to agree with it to 1e-5 a position.
    """

    def __init__(self, logits: Tensor, labels: Tensor) -> None:
        """logits: `[positions, vocabulary]`; labels: `[positions]` int64."""
        self._labels = labels
        log_p = logits.float().log_softmax(-1)
        self._best = log_p.argmax(-1)
        self._p = log_p.exp()
        self._entropy = -torch.linalg.vecdot(self._p, log_p).double()
        nll = -log_p.gather(-1, labels[:, None])[:, 0].double()
        self.own = LogitSums(float(nll.sum()), 0.0, float(len(labels)))
        """The native arm against itself."""

    def sums(self, logits: Tensor) -> LogitSums:
        """Of one arm, `[positions, vocabulary]` of the same width. Errors: `Corrupt` where not finite."""
        logits = logits.float()
        top, best = logits.max(-1, keepdim=True)
        if not bool(torch.isfinite(top).all()):
            raise Corrupt("an arm gave NaN or infinite logits", "nothing was measured")
        shifted = logits - top  # small where p is large: the products keep their digits
        norm = shifted.logsumexp(-1).double()
        cross = norm - torch.linalg.vecdot(self._p, shifted).double()
        nll = norm - shifted.gather(-1, self._labels[:, None])[:, 0].double()
        same = best[:, 0] == self._best
        return LogitSums(float(nll.sum()), float((cross - self._entropy).sum()), float(same.sum()))
