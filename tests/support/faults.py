"""An exchange that fails on demand, around a real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvhub.exchange import DirectoryExchange


class FaultyExchange:
    """A directory exchange whose calls can be delayed, hung, failed or watched.

    delay: seconds by method name. fail: exceptions by method name. hang: methods that do not
    return before `release()`. before: called with the method's name, ahead of the real call.
    """

    def __init__(self, root: Path, **options: Any) -> None:
        self.real = DirectoryExchange(root, **options)
        self.root = root
        self.delay: dict[str, float] = {}
        self.fail: dict[str, Exception] = {}
        self.hang: set[str] = set()
        self.before: Callable[[str], None] = lambda method: None
        self.threads: set[str] = set()
        self._go_on = threading.Event()

    def release(self) -> None:
        """Let every hung call return."""
        self._go_on.set()

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.threads.add(threading.current_thread().name)
        self.before(method)
        if method in self.hang:
            self._go_on.wait(60)
        time.sleep(self.delay.get(method, 0))
        if method in self.fail:
            raise self.fail[method]
        return getattr(self.real, method)(*args, **kwargs)

    def header(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("header", *args, **kwargs)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("get", *args, **kwargs)

    def put(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("put", *args, **kwargs)
