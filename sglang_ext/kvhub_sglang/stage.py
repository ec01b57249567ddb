"""Staging: a request's blocks are looked up, read and checked off the scheduler's thread.

A stage begins when its request arrives, and the request waits in the queue, others
passing it, until the blocks are in memory or its time is up. Only what is staged is
promised, so a load reads nothing, and a slow, hung or lost exchange stalls nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvhub.exchange import Block, BlockCorrupt, BlockMissing
from kvhub.serving.cost import CostModel, Estimate
from kvhub_sglang.metrics import Metrics
from kvhub_sglang.plan import BlockSource
from kvhub_sglang.refusal import Code, Refusal
from kvhub_sglang.report import logger
from kvhub_sglang.workers import Breaker, Budget, Workers

if TYPE_CHECKING:
    from kvhub_sglang.serving import Candidate

KEEP_SECONDS = 60.0
"""How long staged blocks wait for their request to be admitted after its time was up."""


@dataclass
class Found:
    """What a look-up found: sources by block index, and why there are not more."""

    blocks: dict[int, BlockSource] = field(default_factory=dict)
    why: Refusal | None = None
    estimate: Estimate | None = None

    @property
    def candidates(self) -> set[Candidate]:
        """The mappers that its blocks need."""
        return {source.candidate for source in self.blocks.values() if source.candidate is not None}


class Stage:
    """One request's look-up and reads.

    `look` and `read` run on a worker. Everything else is called by the scheduler's thread.
    """

    def __init__(
        self, look: Callable[[], Found], reader: Callable[[BlockSource], Block], until: float
    ) -> None:
        self._look, self._reader = look, reader
        self.until = until
        self.started = time.monotonic()
        self.seconds = 0.0
        self.read = (0, 0)
        """Blocks and bytes read and checked."""
        self.found = Found()
        self.held = 0
        self._blocks: dict[int, Block] = {}
        self._done = threading.Event()
        self._closed = False
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def late(self) -> bool:
        return time.monotonic() > self.until

    def blocks(self) -> dict[int, Block] | None:
        """The checked blocks by index; None once the stage was closed."""
        return None if self._closed else self._blocks

    def run(self, budget: Budget) -> None:
        """Look up and read until done, closed or out of memory. Never raises."""
        started = time.monotonic()
        try:
            if not self._closed:
                self.found = self._look()
                self._read_all(budget)
        except Refusal as refusal:
            self.found = Found({}, refusal)
        except OSError as error:
            why = Refusal(Code.EXCHANGE, f"cannot look into the exchange: {error.strerror or error}")
            self.found = Found({}, why)
        except Exception as error:
            logger.exception("kvhub could not stage a request")
            self.found = Found({}, Refusal(Code.INTERNAL, f"{type(error).__name__} while staging"))
        finally:
            self.seconds = time.monotonic() - started
            self._done.set()

    def _read_all(self, budget: Budget) -> None:
        """Read in order; the first block that fails ends the span there."""
        blocks, last = self.found.blocks, None
        for index in sorted(blocks):
            if last is not None and index != last + 1:
                break  # only own blocks before the device's lossy rows: not contiguous, not needed
            last = index
            source = blocks[index]
            size = source.nbytes
            if not budget.take(size, until=self.until):
                self._cut(index, Refusal(Code.CAPACITY, "no memory to stage its blocks"))
                return
            with self._lock:
                closed = self._closed
                if not closed:
                    self.held += size
            if closed:
                budget.give(size)
                return
            try:
                block = checked(source, self._reader)
            except Refusal as refusal:
                self._cut(index, refusal)
                return
            with self._lock:
                if self._closed:
                    return
                self._blocks[index] = block
            self.read = (self.read[0] + 1, self.read[1] + size)

    def _cut(self, index: int, why: Refusal) -> None:
        kept = {i: b for i, b in self.found.blocks.items() if i < index}
        self.found = Found(kept, why, self.found.estimate)

    def close(self, budget: Budget) -> None:
        """Drop the blocks; a read in progress is dropped when it returns."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._blocks = {}
            held, self.held = self.held, 0
        budget.give(held)


def checked(source: BlockSource, read: Callable[[BlockSource], Block]) -> Block:
    """Read one block and prove that it is the one that was looked up; else `Refusal`."""
    try:
        block = read(source)
    except BlockMissing:
        raise Refusal(Code.EXCHANGE, "a block vanished") from None
    except BlockCorrupt as error:
        raise Refusal(Code.CORRUPT, str(error)) from None
    except OSError as error:
        raise Refusal(Code.EXCHANGE, f"cannot read the exchange: {error.strerror or error}") from None
    found = block.header.lineage
    # the header was read unchecked when the block was looked up; now it is proven
    if (found if source.candidate is None else found.then(source.candidate.digest)) != source.lineage:
        raise Refusal(Code.HOPS, "a block changed its lineage")
    return block


class Stager:
    """All stages of one process: bounded threads, bounded memory, bounded patience."""

    def __init__(
        self, metrics: Metrics, cost: CostModel, *, threads: int, most_bytes: int, wait_seconds: float
    ) -> None:
        self.metrics, self.cost = metrics, cost
        self.workers = Workers("kvhub-stage", threads)
        self.budget = Budget(most_bytes)
        self.breaker = Breaker()
        self.wait_seconds = wait_seconds
        self._live: list[Stage] = []
        self._one_done = threading.Event()

    def start(
        self, look: Callable[[], Found], read: Callable[[BlockSource], Block], *, wait: float | None = None
    ) -> Stage:
        """Begin a stage that a request waits for, `wait` seconds at most; `Refusal` where none is begun."""
        self._sweep()
        if self.breaker.open:
            raise Refusal(Code.SLOW, "the exchange did not answer in time a moment ago")
        if self.workers.stuck(max(self.wait_seconds, 0.1)):
            self.breaker.failed()
            raise Refusal(Code.SLOW, "the exchange does not answer")
        patience = self.wait_seconds if wait is None else min(wait, self.wait_seconds)
        stage = Stage(look, read, time.monotonic() + patience)

        def job() -> None:
            stage.run(self.budget)
            self._one_done.set()
            self.metrics.lookups(len(stage.found.blocks), int(stage.found.why is not None))
            self.metrics.read(*stage.read)
            self.metrics.stage("read", stage.seconds)
            if stage.read[0] == len(stage.found.blocks):
                self.cost.observe_stage(stage.read[0], stage.seconds * 1e3)

        if not self.workers.submit(job):
            raise Refusal(Code.CAPACITY, "too many requests are being staged")
        self._live.append(stage)
        return stage

    def ended(self, stage: Stage) -> None:
        """The request stopped waiting: note whether the exchange kept its time."""
        if stage.done:
            self.breaker.succeeded()
        else:
            self.breaker.failed()
            stage.close(self.budget)

    def close(self, stage: Stage) -> None:
        """The blocks are placed, or no longer wanted."""
        stage.close(self.budget)
        if stage in self._live:
            self._live.remove(stage)

    def wait(self, seconds: float) -> None:
        """Until any stage is done, or `seconds`: for a scheduler that has nothing else to run."""
        self._one_done.wait(seconds)
        self._one_done.clear()

    def _sweep(self) -> None:
        """Requests that went away without a word do not keep memory."""
        now = time.monotonic()
        for stage in [s for s in self._live if s.until + KEEP_SECONDS < now]:
            self.close(stage)
