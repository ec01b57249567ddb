"""How long a Hub may be silent, and how slowly it may speak.

The client has no limit of its own for most of what it asks. Here every request has one for each wait
(connect, read, write) and one for all of it: what is a file, or is sent, may go on as long as it moves.
The whole is kept where bytes come in, at the socket: headers that come letter by letter end, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

TOTAL = 60.0
"""Seconds for an answer from the request to its end, or for `PACE` bytes of what may go on."""
PACE = 64 << 10
"""Bytes."""


@dataclass
class Deadline:
    """When a request must have ended. reads: what comes may go on while it moves; what is sent always may."""

    reads: bool = False
    end: float = field(default_factory=lambda: time.monotonic() + TOTAL)
    moved: int = 0

    def left(self) -> float:
        """Seconds, more than none. Errors: `TimeoutError`, which the client does not try again."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no end after {TOTAL:g} s")
        return left

    def move(self, count: int) -> None:
        """So many bytes came or went."""
        self.moved += count
        if self.moved >= PACE:
            self.moved, self.end = 0, time.monotonic() + TOTAL


_deadline: ContextVar[Deadline | None] = ContextVar("kvhub_hub_deadline", default=None)


@contextmanager
def until(deadline: Deadline) -> Iterator[None]:
    """Keep a deadline in this thread; one that is there already stays."""
    if _deadline.get() is not None:
        yield
        return
    token = _deadline.set(deadline)
    try:
        yield
    finally:
        _deadline.reset(token)


def limit(request: Any, *, stream: bool) -> Deadline:
    """Give a request its limits: HF_HUB_ETAG_TIMEOUT (of a file: HF_HUB_DOWNLOAD_TIMEOUT), or less."""
    from huggingface_hub import constants

    most = float(constants.HF_HUB_DOWNLOAD_TIMEOUT if stream else constants.HF_HUB_ETAG_TIMEOUT)
    given = request.extensions.get("timeout") or {}
    asks = request.method in ("GET", "HEAD")
    limits = {}
    for kind in ("connect", "read", "write", "pool"):
        # A Hub may work on a commit for a while, and a pool is waited for while others use it.
        longest = most if kind != "pool" and (asks or kind != "read") else max(most, TOTAL)
        wanted = given.get(kind)
        limits[kind] = longest if wanted is None else min(wanted, longest)
    request.extensions = {**request.extensions, "timeout": limits}
    return Deadline(reads="Range" in request.headers)


def watch(session: Any) -> None:
    """Keep deadlines at the sockets of a session (httpx or httpx2; of one built otherwise only waits end)."""
    for transport in (getattr(session, "_transport", None), *getattr(session, "_mounts", {}).values()):
        pool = getattr(transport, "_pool", None)
        backend = getattr(pool, "_network_backend", None)
        if backend is not None and not isinstance(backend, _Backend):
            pool._network_backend = _Backend(backend)  # type: ignore[union-attr]


class _Backend:
    """Makes connections that keep deadlines."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def connect_tcp(self, *given: Any, **named: Any) -> Any:
        return _Stream(self._inner.connect_tcp(*given, **named))


class _Stream:
    """One connection."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start_tls(self, *given: Any, **named: Any) -> Any:
        return _Stream(self._inner.start_tls(*given, **named))

    def read(self, max_bytes: int, timeout: float | None = None) -> Any:
        deadline = _deadline.get()
        if deadline is None:
            return self._inner.read(max_bytes, timeout)
        left = deadline.left()
        try:
            data = self._inner.read(max_bytes, left if timeout is None else min(timeout, left))
        except Exception:
            deadline.left()  # the whole is over, not only this wait
            raise
        if deadline.reads:
            deadline.move(len(data))
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout)
        deadline = _deadline.get()
        if deadline is not None:
            deadline.move(len(buffer))
