"""An exchange that fails on demand, around a real one."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvhub.exchange import DirectoryExchange


class FaultyExchange:
    """A directory exchange whose calls can be delayed, hung, failed or watched.

    delay: seconds by method name. fail: exceptions by method name. hang: methods that do not
    return before `release()`. before: called with the method's name, ahead of the real call.
    `headers` has the faults of `header`. calls: how often each method was called.
    """

    def __init__(self, root: Path, **options: Any) -> None:
        self.real = DirectoryExchange(root, **options)
        self.root = root
        self.delay: dict[str, float] = {}
        self.fail: dict[str, Exception] = {}
        self.hang: set[str] = set()
        self.before: Callable[[str], None] = lambda method: None
        self.threads: set[str] = set()
        self.calls: Counter[str] = Counter()
        self._go_on = threading.Event()

    def release(self) -> None:
        """Let every hung call return."""
        self._go_on.set()

    def _call(self, method: str, *args: Any, real: str = "", **kwargs: Any) -> Any:
        self.calls[real or method] += 1
        self.threads.add(threading.current_thread().name)
        self.before(method)
        if method in self.hang:
            self._go_on.wait(60)
        time.sleep(self.delay.get(method, 0))
        if method in self.fail:
            raise self.fail[method]
        return getattr(self.real, real or method)(*args, **kwargs)

    def header(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("header", *args, **kwargs)

    def headers(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("header", *args, real="headers", **kwargs)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("get", *args, **kwargs)

    def put(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("put", *args, **kwargs)
