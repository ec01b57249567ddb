"""The same work on several things at once, on threads that an interrupt does not wait for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TypeVar

from kvhub.errors import KvhubError

T = TypeVar("T")
R = TypeVar("R")

PATIENCE = 5.0
"""Seconds that a failure waits for work under way; what that leaves, the next command sweeps."""
INTERRUPTED = 1.0
"""Seconds that an interrupt waits for it."""
_TICK = 0.2
_stop: ContextVar[threading.Event | None] = ContextVar("kvhub_stop", default=None)


class Stopped(KvhubError):
    """Raised in a thread whose work nobody waits for any more."""


def end_if_stopped() -> None:
    """End the work of this thread where it is one of `for_each`, and that has ended. Errors: `Stopped`.

    Called wherever a thread comes back from the network, so that it writes nothing once the caller has
    cleaned up.
    """
    stop = _stop.get()
    if stop is not None and stop.is_set():
        raise Stopped("stopped")


def for_each(
    items: Sequence[T],
    work: Callable[[T], R],
    done: Callable[[R], None],
    *,
    threads: int,
    name: str,
    waiting: Callable[[], None] | None = None,
) -> None:
    """`work` of every item, `threads` at once; `done` is called here with each result as it comes.

    waiting: called while nothing comes. The first failure ends it and is raised: nothing new is begun, and
    what is under way has `PATIENCE` seconds to end, so that nothing is written when the caller cleans
    up or tries in another way. An interrupt waits `INTERRUPTED` seconds: whoever still waits for the network
    then (the threads are daemons) ends at `end_if_stopped` when it comes back.
    """
    left: queue.SimpleQueue[T] = queue.SimpleQueue()
    found: queue.SimpleQueue[tuple[R] | BaseException] = queue.SimpleQueue()
    stop = threading.Event()
    for item in items:
        left.put(item)

    def worker() -> None:
        _stop.set(stop)
        while not stop.is_set():
            try:
                item = left.get_nowait()
            except queue.Empty:
                return
            try:
                found.put((work(item),))
            except BaseException as error:
                found.put(error)

    running: list[threading.Thread] = []
    try:
        for number in range(min(threads, len(items))):  # inside: an interrupt may come while they start
            running.append(threading.Thread(target=worker, name=f"{name}-{number}", daemon=True))
            running[-1].start()
        for _ in items:
            outcome = _next(found, waiting)
            if isinstance(outcome, BaseException):
                raise outcome
            done(outcome[0])
    except BaseException as error:
        stop.set()
        deadline = time.monotonic() + (PATIENCE if isinstance(error, Exception) else INTERRUPTED)
        for thread in running:
            if thread.is_alive():  # not one whose start was interrupted
                thread.join(max(0.0, deadline - time.monotonic()))
        raise
    finally:
        stop.set()


def _next(
    found: queue.SimpleQueue[tuple[R] | BaseException], waiting: Callable[[], None] | None
) -> tuple[R] | BaseException:
    while True:
        try:
            return found.get(timeout=None if waiting is None else _TICK)
        except queue.Empty:
            if waiting is not None:
                waiting()
