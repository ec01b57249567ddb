"""Writes blocks to the exchange off the scheduler's thread.

The rows are copied from the pool before the request's slots can be reused; hashing and
writing are a worker's. An answer waits a little for its blocks, so that the next turn
finds them, unless the writer is behind already or other requests are in work, which would
wait with it.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvhub_sglang.metrics import Metrics
from kvhub_sglang.report import logger
from kvhub_sglang.workers import Budget, Workers

if TYPE_CHECKING:
    from torch import Tensor

    from kvhub.exchange import BlockHeader, Exchange, Layout, Lineage

_REMEMBERED = 1 << 17


@dataclass(frozen=True)
class Publication:
    """One block to be stored; payload: `Layout.shape`, a copy, or None to see whether it is still there."""

    key: bytes
    position: int
    lineage: Lineage
    payload: Tensor | None


class Publisher:
    """One thread that stores blocks, in the order in which requests finished."""

    def __init__(self, exchange: Exchange, metrics: Metrics, *, most_bytes: int, wait_seconds: float) -> None:
        self.exchange = exchange
        self.metrics = metrics
        self.workers = Workers("kvhub-publish", 1)
        self.budget = Budget(most_bytes)
        self.wait_seconds = wait_seconds
        self._stored: OrderedDict[bytes, int] = OrderedDict()

    def is_stored(self, key: bytes, hops: int) -> bool:
        """Whether a block of no more hops was seen in the exchange, so that its rows need no copy."""
        return self._stored.get(key, hops + 1) <= hops

    def room(self, size: int) -> bool:
        """Reserve memory for a copy; False where too much is on its way already."""
        return self.budget.take(size, until=0.0)

    def publish(self, model: str, layout: Layout, blocks: Sequence[Publication], *, wait: bool = True) -> int:
        """Store blocks whose payloads were reserved by `room`. Returns how many are new by now.

        wait: a little, on the caller's thread.
        """
        done = threading.Event()
        stored = [0]
        size = sum(layout.nbytes for block in blocks if block.payload is not None)

        def job() -> None:
            started = time.monotonic()
            try:
                for block, present in zip(blocks, self._present(blocks), strict=True):
                    stored[0] += self._store(model, layout, block, present)
            except OSError as error:  # full or gone: nothing is owed to the exchange
                self.metrics.error("exchange")
                logger.warning("kvhub could not publish: %s", error)
            finally:
                self.budget.give(size)
                self.metrics.published(stored[0], time.monotonic() - started, stored[0] * layout.nbytes)
                done.set()

        # behind, or hung: this request's blocks would not be there in time anyway
        behind = self.workers.queued > 0 or self.workers.stuck(max(1.0, self.wait_seconds))
        if not self.workers.submit(job):
            self.budget.give(size)
            self.metrics.dropped(size // layout.nbytes)
            return 0
        if wait and size and not behind:
            done.wait(self.wait_seconds)
        return stored[0]

    def _present(self, blocks: Sequence[Publication]) -> Sequence[BlockHeader | None]:
        try:
            return self.exchange.headers([block.key for block in blocks])
        except FileNotFoundError:  # all of it is gone; storing a block brings it back
            return [None] * len(blocks)

    def _store(self, model: str, layout: Layout, block: Publication, present: BlockHeader | None) -> int:
        hops = block.lineage.hops
        if present is not None and present.lineage.hops <= hops:
            self._remember(block.key, present.lineage.hops)
            return 0
        if block.payload is None:
            self._stored.pop(block.key, None)  # evicted since: the next turn stores it again
            return 0
        new = self.exchange.put(
            block.key,
            model=model,
            position=block.position,
            layout=layout,
            lineage=block.lineage,
            payload=block.payload,
        )
        self._remember(block.key, hops)
        return int(new)

    def _remember(self, key: bytes, hops: int) -> None:
        self._stored[key] = hops
        while len(self._stored) > _REMEMBERED:
            self._stored.popitem(last=False)
