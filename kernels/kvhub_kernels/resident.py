"""Mappers kept ready, in any form, within a budget of bytes; the least recently used one goes first."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, NamedTuple


class _Held(NamedTuple):
    ready: Any
    size: int
    build: Callable[[], Any]


class _Building(NamedTuple):
    done: Future[Any]
    size: int


class Resident:
    """Safe to share between threads. One that is in use when it is evicted lives until its caller is done.

    Each is built once, by the first thread that asks; others that ask for it wait, and nobody else does.
    """

    def __init__(self, budget: int) -> None:
        """budget: bytes of weights."""
        self.budget = budget
        self._held: OrderedDict[Hashable, _Held] = OrderedDict()
        self._building: dict[Hashable, _Building] = {}
        self._alive: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is held."""
        return sum(held.size for held in list(self._held.values()))

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def find(self, key: Hashable) -> Any | None:
        """What is ready as `key`, if it is held. While the caller keeps it, `get` of it builds nothing."""
        with self._changed:
            held = self._held.get(key)
            return None if held is None else held.ready

    def get(self, key: Hashable, size: int, build: Callable[[], Any]) -> Any:
        """What is ready as `key`, built on this thread if it is not held; room for `size` bytes is made
        before.

        Where that leaves no room beside what is being built meanwhile, it waits for those. Errors:
        `ValueError` if it alone is over the budget, and nothing is evicted; whatever `build` raises, to all
        that wait for it: then nothing is held under `key`, and what had to make room for it is made again.
        """
        with self._changed:
            while True:
                held = self._held.get(key)
                if held is not None:
                    self._held.move_to_end(key)
                    return held.ready
                other = self._building.get(key)
                if other is not None:
                    break
                if size > self.budget:
                    raise ValueError(f"a mapper of {size} bytes does not fit into {self.budget}")
                reserved = sum(building.size for building in self._building.values())
                if reserved + size > self.budget:
                    self._changed.wait()
                    continue
                gone = self._evict(size + reserved)
                alive = self._alive.get(key)
                if alive is not None:  # evicted while in use, and wanted again
                    self._held[key] = _Held(alive, size, build)
                    return alive
                mine = self._building[key] = _Building(Future(), size)
                break
        if other is not None:
            return other.done.result()
        try:
            ready = build()
        except BaseException as error:
            self._settle(key, None)
            mine.done.set_exception(error)
            for old, (old_size, old_build) in gone.items():
                with contextlib.suppress(Exception):  # the caller is told of the first error
                    self.get(old, old_size, old_build)
            raise
        self._settle(key, _Held(ready, size, build))
        mine.done.set_result(ready)
        return ready

    def drop(self, key: Hashable) -> None:
        """Let go of one, if it is held."""
        with self._changed:
            self._held.pop(key, None)

    def _evict(self, wanted: int) -> dict[Hashable, tuple[int, Callable[[], Any]]]:
        """Let go until `wanted` bytes fit; what went, without its weights."""
        gone = {}
        while self._held and self.nbytes + wanted > self.budget:
            key, held = self._held.popitem(last=False)
            gone[key] = held.size, held.build
        return gone

    def _settle(self, key: Hashable, held: _Held | None) -> None:
        """The build of `key` has ended; `held` is what came of it."""
        with self._changed:
            del self._building[key]
            if held is not None:
                self._held[key] = held
                self._alive[key] = held.ready
            self._changed.notify_all()
