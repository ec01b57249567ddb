"""Threads for what may be slow or hang, so that the scheduler's own thread never waits for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from kvhub_sglang.report import logger


class Workers:
    """A fixed number of daemon threads and a bounded queue.

    Daemons, not a pool that is joined at exit: a read that never returns must not keep
    the server from ending. A job that raises is logged; the thread lives on.
    """

    def __init__(self, name: str, threads: int, *, waiting: int = 1024) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._waiting = waiting
        self._ready = threading.Condition()
        self._busy_since: dict[int, float] = {}
        self._name, self._threads, self._started = name, threads, False

    def submit(self, job: Callable[[], None]) -> bool:
        """Queue a job; False where the queue is full (it is not run then)."""
        with self._ready:
            if len(self._jobs) >= self._waiting:
                return False
            if not self._started:
                self._started = True
                for number in range(self._threads):
                    thread = threading.Thread(
                        target=self._run, args=(number,), name=f"{self._name}-{number}", daemon=True
                    )
                    thread.start()
            self._jobs.append(job)
            self._ready.notify()
        return True

    def stuck(self, seconds: float) -> bool:
        """Whether every thread has been at one job for longer than `seconds`."""
        now = time.monotonic()
        with self._ready:
            busy = list(self._busy_since.values())
        return len(busy) == self._threads and all(now - since > seconds for since in busy)

    @property
    def queued(self) -> int:
        """Jobs that no thread has begun."""
        return len(self._jobs)

    def _run(self, number: int) -> None:
        while True:
            with self._ready:
                while not self._jobs:
                    self._ready.wait()
                job = self._jobs.popleft()
                self._busy_since[number] = time.monotonic()
            try:
                job()
            except Exception:
                logger.exception("kvhub: a job of %s failed", self._name)
            finally:
                with self._ready:
                    del self._busy_since[number]
                del job


class Budget:
    """Bytes that several jobs may hold together."""

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self._freed = threading.Condition()

    def take(self, count: int, *, until: float) -> bool:
        """Reserve bytes, waiting until `until` (`time.monotonic`) for others to give some back."""
        with self._freed:
            while self.held + count > self.most:
                left = until - time.monotonic()
                if left <= 0 or count > self.most:
                    return False
                self._freed.wait(left)
            self.held += count
            return True

    def give(self, count: int) -> None:
        """Give bytes back."""
        with self._freed:
            self.held -= count
            self._freed.notify_all()


class Breaker:
    """After a time-out nobody waits for a while: 5 s, doubling to 60 s until one succeeds."""

    first, longest = 5.0, 60.0

    def __init__(self) -> None:
        self._until, self._pause = 0.0, self.first

    @property
    def open(self) -> bool:
        return time.monotonic() < self._until

    def failed(self) -> None:
        if not self.open:
            self._until = time.monotonic() + self._pause
            self._pause = min(self.longest, self._pause * 2)

    def succeeded(self) -> None:
        self._until, self._pause = 0.0, self.first
