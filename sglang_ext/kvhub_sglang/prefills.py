"""How long prefills take, batch by batch, from the times SGLang keeps of its requests."""

from __future__ import annotations

from kvhub.serving.cost import CostModel


class Prefills:
    """Joins the requests that entered the forward together: they were computed in one batch."""

    def __init__(self) -> None:
        self._entered = 0.0
        self._tokens = 0
        self._pairs = 0.0
        self._done = 0.0

    def add(self, cost: CostModel, entered: float, done: float, tokens: int, context: int) -> None:
        """One request's prefill; times in seconds of one clock. Tells `cost` of finished batches."""
        if entered != self._entered:
            self._flush(cost)
            self._entered, self._tokens, self._pairs, self._done = entered, 0, 0.0, done
        self._tokens += tokens
        # tokens * (context + tokens / 2), summed, is what the cost model's last term counts
        self._pairs += tokens * (context + tokens / 2)
        self._done = max(self._done, done)
        if tokens == 0:
            self._tokens = -(10**9)  # a batch with a request of unknown size teaches nothing

    def _flush(self, cost: CostModel) -> None:
        if self._tokens > 0:
            context = self._pairs / self._tokens - self._tokens / 2
            cost.observe_prefill(self._tokens, context, (self._done - self._entered) * 1e3)
