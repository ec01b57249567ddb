"""Mappers that are kept ready, within a budget of bytes; the least recently used one goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

from kvhub_kernels.apply import Applier


class Resident:
    """Safe to share between threads. One that is in use when it is evicted lives until its caller is done."""

    def __init__(self, budget: int) -> None:
        """budget: bytes of weights."""
        self.budget = budget
        self._held: OrderedDict[Hashable, tuple[Applier, int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is held."""
        return sum(size for _, size in self._held.values())

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def get(self, key: Hashable, size: int, build: Callable[[], Applier]) -> Applier:
        """The applier `key`, built if it is not held; room for `size` bytes is made before it is.

        Errors: `ValueError` if it alone is over the budget; whatever `build` raises, and then nothing
        is held under `key`.
        """
        with self._lock:
            found = self._held.get(key)
            if found is not None:
                self._held.move_to_end(key)
                return found[0]
            if size > self.budget:
                raise ValueError(f"a mapper of {size} bytes does not fit into {self.budget}")
            while self._held and self.nbytes + size > self.budget:
                self._held.popitem(last=False)
            applier = build()
            self._held[key] = applier, size
            return applier

    def drop(self, key: Hashable) -> None:
        """Let go of one, if it is held."""
        with self._lock:
            self._held.pop(key, None)
