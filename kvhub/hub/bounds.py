"""What a Hub may send and ask for: bytes of an answer and of a file, one page, a wait (and see `waits`).

A Hub is believed in nothing, so nothing that it sends is without end: a JSON answer has `ANSWER_LIMIT` bytes,
a file those that were listed, a listing one page. The session is httpx or httpx2, by the client's version;
the hooks used here both have.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from kvhub.errors import Corrupt, KvhubError
from kvhub.hub import waits
from kvhub.hub.parallel import end_if_stopped

ANSWER_LIMIT = 16 << 20
"""Bytes of an answer that is no file, unpacked. Python needs up to 28 times as much for what JSON holds."""
LONGEST_WAIT = 60.0
"""Seconds; a longer Retry-After is not waited for."""
ASKED = "kvhub_retry_after"
"""Where Retry-After is kept, in a response's extensions."""
_CODINGS = {"", "identity", "gzip", "x-gzip", "deflate"}
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?", re.ASCII)
_RESET = re.compile(r"\bt\s*=\s*([^;,\s]*)")


@dataclass
class Task:
    """What this thread asks the Hub for."""

    what: str
    """The repository or place, for messages."""
    file: str = ""
    size: int | None = None
    """Bytes of the file that is fetched; None where nothing is known of it."""
    one_page: bool = False
    """A listing: its first page, and no attempts of the client's own below those of `ask`."""
    more: bool = False
    """Whether a listing of one page had a next one."""
    lost: float = 0.0
    """Seconds of waits in vain since something came."""


_task: ContextVar[Task | None] = ContextVar("kvhub_hub_task", default=None)
_streamed: ContextVar[bool] = ContextVar("kvhub_hub_streamed", default=False)
_installing = threading.Lock()


@contextmanager
def task(what: str, *, file: str = "", size: int | None = None, one_page: bool = False) -> Iterator[Task]:
    """Bound what is asked of the Hub in the block, in this thread."""
    found = Task(what, file, size, one_page)
    token = _task.set(found)
    try:
        yield found
    finally:
        _task.reset(token)


@contextmanager
def within(what: str) -> Iterator[Task]:
    """The task that is at hand, or one of nothing but answers."""
    at_hand = _task.get()
    if at_hand is not None:
        yield at_hand
        return
    with task(what) as found:
        yield found


def install() -> None:
    """Have every session that the client makes from now on bounded."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    with _installing:
        before = _http._GLOBAL_CLIENT_FACTORY  # whoever uses kvhub as a library may have set one
        if getattr(before, "kvhub_bounds", False):
            return

        def factory() -> Any:
            return bounded(before())

        factory.kvhub_bounds = True  # type: ignore[attr-defined]
        set_client_factory(factory)


def bounded(session: Any) -> Any:
    """The same session, whose answers end."""
    send = session.send

    def checked(request: Any, *, stream: bool = False, **rest: Any) -> Any:
        end_if_stopped()
        token, begun = _streamed.set(stream), time.monotonic()
        try:
            with waits.until(waits.limit(request, stream=stream)):
                answer = send(request, stream=stream, **rest)
        except Exception as error:
            _in_vain(begun)
            raise _once(error) from error
        finally:
            _streamed.reset(token)
        try:
            end_if_stopped()  # what the client does next may make the directory again that is cleaned up
        except KvhubError:
            answer.close()
            raise
        return answer

    waits.watch(session)
    session.send = checked
    # Those of which 64 kB cannot become gigabytes.
    session.headers["Accept-Encoding"] = "gzip, deflate"
    hooks = session.event_hooks
    session.event_hooks = {**hooks, "response": [*hooks.get("response", []), _received]}
    return session


def _once(error: Exception) -> Exception:
    """A lost connection in a listing as what the client does not try again; else `error` itself."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    doing = _task.get()
    lost = isinstance(error, HTTPError) and getattr(error, "response", None) is None
    if doing is not None and doing.one_page and lost:
        return TimeoutError(str(error)) if "Timeout" in type(error).__name__ else ConnectionError(str(error))
    return error


def _in_vain(begun: float) -> None:
    doing = _task.get()
    if doing is not None:
        doing.lost += time.monotonic() - begun


def _received(response: Any) -> None:
    """Called with every answer, before its body is read; also with those that lead elsewhere."""
    doing = _task.get()
    file = _streamed.get() and 200 <= response.status_code < 300
    if file and doing is None:  # files of models, which are no task of ours
        _end(response, None, "")
        return
    what = doing.what if doing is not None else "a request"
    if response.headers.get("Content-Encoding", "").strip().lower() not in _CODINGS:
        raise Corrupt(f"an answer of the Hub for {what} is packed as nobody asked", "check HF_ENDPOINT")
    _waits(response)
    if doing is not None and doing.one_page and (response.status_code == 429 or response.status_code >= 500):
        from huggingface_hub.errors import HfHubHTTPError

        raise HfHubHTTPError(f"status {response.status_code}", response=response)
    if doing is not None and doing.one_page and "link" in response.headers:
        doing.more = "next" in response.headers["link"]
        del response.headers["link"]
    if doing is not None and doing.size is not None:
        _announced(response, doing, doing.size)
    begun = _RANGE.match(response.request.headers.get("Range", ""))
    if not file:
        # Who reads a part of a data set has asked for so much.
        asked = int(begun[2]) + 1 - int(begun[1]) if begun and begun[2] else 0
        limit = max(ANSWER_LIMIT, asked)
        _end(response, limit, f"an answer of the Hub for {what} is larger than {limit} bytes")
    elif doing is not None and doing.size is None:
        _end(response, None, "")
    elif doing is not None and doing.size is not None:
        here = int(begun[1]) if begun and response.status_code == 206 else 0
        _end(response, max(0, doing.size - here), _larger(doing))


def _larger(doing: Task) -> str:
    return f"{doing.file} of {doing.what} is larger than the {doing.size} bytes that are listed"


def _announced(response: Any, doing: Task, size: int) -> None:
    """What is said of a file before it is fetched, which is all that xet storage is asked for."""
    said = response.headers.get("X-Linked-Size", "")
    if not said and response.request.method == "HEAD" and 200 <= response.status_code < 300:
        said = response.headers.get("Content-Length", "")
    if said.isascii() and said.isdigit() and (len(said) > 18 or int(said) > size):
        raise Corrupt(_larger(doing), "try again")


def _waits(response: Any) -> None:
    """Keep from the client what it would sleep for without end, or cannot read; `ask` decides on it."""
    headers = response.headers
    asked = headers.get("Retry-After", "").strip()
    if asked:
        response.extensions[ASKED] = asked
        if not (asked.isascii() and asked.isdigit() and len(asked) < 6 and int(asked) <= LONGEST_WAIT):
            del headers["Retry-After"]
    reset = _RESET.search(headers.get("RateLimit", ""))
    if reset and not (reset[1].isascii() and reset[1].isdigit() and len(reset[1]) < 3):
        del headers["RateLimit"]


def _end(response: Any, limit: int | None, message: str) -> None:
    """Let the body of an answer end at `limit` bytes: with an error, before any more is kept.

    What is streamed must move, too (`waits`).
    """
    plain = response.iter_bytes

    def pieces(chunk_size: int | None = None) -> Iterator[bytes]:
        got, source, paced = 0, plain(chunk_size), waits.Deadline(reads=True)
        while True:
            begun = time.monotonic()
            try:
                with waits.until(paced):
                    piece = next(source, None)
            except Exception:
                _in_vain(begun)
                raise
            end_if_stopped()
            if piece is None:
                return
            got += len(piece)
            doing = _task.get()
            if doing is not None and len(piece) >= waits.PACE:
                doing.lost = 0.0
            if limit is not None and got > limit:
                response.close()
                raise Corrupt(message, "check HF_ENDPOINT; the repository or its Hub may be hostile")
            yield piece

    response.iter_bytes = pieces
