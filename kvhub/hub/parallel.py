"""The same work on several things at once, on threads that an interrupt does not wait for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

PATIENCE = 5.0
"""Seconds that a failure waits for work under way; what that leaves, the next command sweeps."""
_TICK = 0.2


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
    up or tries in another way. An interrupt waits for nothing: the threads are daemons.
    """
    left: queue.SimpleQueue[T] = queue.SimpleQueue()
    found: queue.SimpleQueue[tuple[R] | BaseException] = queue.SimpleQueue()
    stop = threading.Event()
    for item in items:
        left.put(item)

    def worker() -> None:
        while not stop.is_set():
            try:
                item = left.get_nowait()
            except queue.Empty:
                return
            try:
                found.put((work(item),))
            except BaseException as error:
                found.put(error)

    running = [
        threading.Thread(target=worker, name=f"{name}-{number}", daemon=True)
        for number in range(min(threads, len(items)))
    ]
    for thread in running:
        thread.start()
    try:
        for _ in items:
            outcome = _next(found, waiting)
            if isinstance(outcome, BaseException):
                raise outcome
            done(outcome[0])
    except Exception:
        stop.set()
        deadline = time.monotonic() + PATIENCE
        for thread in running:
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
