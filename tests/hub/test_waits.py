"""A Hub that is silent, or speaks letter by letter: exit code 5, and files go on while they move."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants, get_session
from loopback_hub import LoopbackHub
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from support.fuzzing import impatient

from kvhub.artifact.manifest import Manifest
from kvhub.errors import Unreachable
from kvhub.hub import bounds, waits
from kvhub.hub.client import api
from kvhub.hub.pull import fetch
from kvhub.hub.search import search
from kvhub.model.resolve import resolve
from kvhub.settings import Settings

REPO = "tester/mapper"
SOON = 20.0
"""Seconds; without limits these tests would not end."""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9000\r\n\r\n"
SAID: dict[str, Callable[[], Iterator[bytes]]] = {
    "nothing": lambda: iter(()),
    "a head letter by letter": lambda: (bytes([letter]) for letter in HEAD),
    "a body letter by letter": lambda: iter([HEAD, *([b" "] * 9000)]),
}


@contextmanager
def speaking(said: Callable[[], Iterator[bytes]]) -> Iterator[str]:
    """The address of a server that says this, with a pause after each piece, and never ends."""
    ended = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            for piece in said():
                connection.sendall(piece)
                if ended.wait(0.05):
                    return
            ended.wait()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            ended.set()
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setattr(waits, "TOTAL", 1.5)
    with impatient():
        yield


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
@pytest.mark.parametrize("ask_for", [lambda: fetch(REPO), search], ids=["pull", "search"])
def test_a_hub_that_does_not_answer(
    ask_for: Callable[[], object],
    said: Callable[[], Iterator[bytes]],
    hasty: None,
    home: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = time.monotonic()
    with speaking(said) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        with pytest.raises(Unreachable, match="the Hub does not answer for") as refused:
            ask_for()
    assert refused.value.exit_code == 5
    assert time.monotonic() - begun < SOON


def test_a_model_of_a_silent_hub(
    hasty: None, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = time.monotonic()
    with speaking(SAID["nothing"]) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        with pytest.raises(Unreachable):
            resolve("o/m")
    assert time.monotonic() - begun < SOON


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
@pytest.mark.parametrize("pause", [0.05, 30.0], ids=["letter by letter", "silent"])
def test_a_file_that_does_not_move(
    published: Manifest, hub: LoopbackHub, home: Settings, hasty: None, name: str, pause: float
) -> None:
    entry = hub.store.repos[REPO].head.tree[name]
    where, ended = str(entry.lfs) if entry.lfs else f"/{name}", threading.Event()

    def body() -> Iterator[bytes]:
        for _ in range(entry.size):
            yield b" "
            if ended.wait(pause):
                return

    def slow(request: Request) -> Response | None:
        return StreamingResponse(body()) if where in request.url.path and request.method == "GET" else None

    hub.faults.append(slow)
    begun = time.monotonic()
    try:
        with pytest.raises(Unreachable, match="does not answer"):
            fetch(REPO)
    finally:
        ended.set()
    assert time.monotonic() - begun < SOON
    assert [path.name for path in home.mappers.glob("*") if path.name != ".lock"] == []


def test_a_file_that_moves_may_take_longer(published: Manifest, hub: LoopbackHub, hasty: None) -> None:
    count = 10

    def body() -> Iterator[bytes]:
        for _ in range(count):
            yield b"x" * waits.PACE
            ended.wait(0.25)

    ended = threading.Event()
    hub.faults.append(lambda request: StreamingResponse(body()) if request.url.path == "/slow" else None)
    api()
    begun = time.monotonic()
    with (
        bounds.task("o/m", file="slow", size=count * waits.PACE) as doing,
        get_session().stream("GET", f"{hub.url}/slow", timeout=None) as response,
    ):
        got = sum(len(piece) for piece in response.iter_bytes(waits.PACE))
    assert got == count * waits.PACE and doing.lost == 0.0
    assert time.monotonic() - begun > waits.TOTAL


def test_no_request_is_without_limits(hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 7)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 20)
    api()
    session = get_session()

    def limits(method: str, given: float | None, *, stream: bool = False) -> dict[str, float]:
        request = session.build_request(method, hub.url, timeout=given)
        waits.limit(request, stream=stream)
        found: dict[str, float] = request.extensions["timeout"]
        return found

    assert limits("GET", None) == {"connect": 7, "read": 7, "write": 7, "pool": waits.TOTAL}
    assert limits("HEAD", 60)["read"] == 7 and limits("HEAD", 2)["read"] == 2
    assert limits("GET", None, stream=True)["read"] == 20
    assert limits("POST", None)["read"] == waits.TOTAL and limits("POST", None)["connect"] == 7
