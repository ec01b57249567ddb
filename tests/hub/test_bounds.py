"""A Hub that sends, lists or waits without end: what comes of it ends all the same."""

from __future__ import annotations

import gzip
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from huggingface_hub import get_session
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from loopback_hub import LoopbackHub
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from support.fuzzing import impatient

from kvhub.artifact.manifest import Manifest
from kvhub.errors import Corrupt, KvhubError, Unreachable
from kvhub.hub import bounds, store
from kvhub.hub.client import ATTEMPTS, LONGEST_WAIT, _seconds, api, ask
from kvhub.hub.parallel import Stopped, for_each
from kvhub.hub.pull import fetch
from kvhub.hub.search import search
from kvhub.settings import Settings

REPO = "tester/mapper"
CHUNK = 1 << 20


class Endless:
    """An answer that goes on; counts what was taken of it."""

    def __init__(self, where: str, begin: bytes = b"", chunks: int = 400, **headers: str) -> None:
        self.where, self.begin, self.chunks, self.headers = where, begin, chunks, headers
        self.sent = 0

    def __call__(self, request: Request) -> Response | None:
        if self.where not in request.url.path or request.method != "GET":
            return None
        return StreamingResponse(self._body(), headers=self.headers)

    def _body(self) -> Iterator[bytes]:
        yield self.begin
        for _ in range(self.chunks):
            self.sent += CHUNK
            yield b" " * CHUNK


@pytest.mark.parametrize("ask_for", [lambda: fetch(REPO), search], ids=["pull", "search"])
def test_an_answer_ends(published: Manifest, hub: LoopbackHub, ask_for: Callable[[], object]) -> None:
    endless = Endless("/api/models", b"[")
    hub.faults.append(endless)
    with pytest.raises(Corrupt, match=f"larger than {bounds.ANSWER_LIMIT} bytes"):
        ask_for()
    assert endless.sent < 4 * bounds.ANSWER_LIMIT


def test_an_answer_that_unpacks_to_more_ends(published: Manifest, hub: LoopbackHub) -> None:
    bomb = gzip.compress(b"[" + b" " * (200 << 20))
    hub.faults[:] = [lambda _: Response(bomb, headers={"Content-Encoding": "gzip"})]
    with pytest.raises(Corrupt, match="larger than"):
        fetch(REPO)
    twice = gzip.compress(bomb)
    hub.faults[:] = [lambda _: Response(twice, headers={"Content-Encoding": "gzip, gzip"})]
    with pytest.raises(Corrupt, match="packed as nobody asked"):
        fetch(REPO)


def test_an_answer_that_leads_elsewhere_ends(published: Manifest, hub: LoopbackHub) -> None:
    def elsewhere(request: Request) -> Response | None:
        found = endless(request)
        if found is not None:
            found.status_code, found.headers["Location"] = 302, "/elsewhere"
        return found

    endless = Endless("/api/models")
    hub.faults.append(elsewhere)
    with pytest.raises(Corrupt, match="larger than"):
        fetch(REPO)
    assert endless.sent < 4 * bounds.ANSWER_LIMIT


@pytest.mark.parametrize("name", ["manifest.json", "evidence.json", "model.safetensors"])
def test_a_file_ends_where_its_listed_size_does(
    published: Manifest, hub: LoopbackHub, home: Settings, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = hub.store.repos[REPO].head.tree[name]
    endless = Endless(str(entry.lfs) if entry.lfs else f"/resolve/{hub.store.repos[REPO].head.sha}/{name}")
    hub.faults.append(endless)
    most = 0
    real = store.shutil.rmtree  # type: ignore[attr-defined]

    def measured(path: Path, **given: bool) -> None:
        nonlocal most
        found = [one for one in Path(path).rglob("*") if one.is_file() and not one.is_symlink()]
        most = max([most, *(one.stat().st_size for one in found)])
        real(path, **given)

    monkeypatch.setattr("kvhub.hub.store.shutil.rmtree", measured)
    with pytest.raises(Corrupt, match=rf"{name} of {REPO} is larger than the {entry.size} bytes"):
        fetch(REPO)
    assert most <= max(one.size for one in hub.store.repos[REPO].head.tree.values())
    assert endless.sent < 40 * CHUNK
    assert [path.name for path in home.mappers.glob("*") if path.name != ".lock"] == []


def test_a_file_that_is_announced_larger_is_not_fetched(published: Manifest, hub: LoopbackHub) -> None:
    """Xet storage is asked for what was announced, by another way than the session."""

    def larger(request: Request) -> Response | None:
        if request.method != "HEAD" or not request.url.path.endswith("model.safetensors"):
            return None
        headers = {"X-Repo-Commit": hub.store.repos[REPO].head.sha, "ETag": '"' + "0" * 64 + '"'}
        return Response(headers=headers | {"X-Linked-Size": "9" * 14, "X-Linked-ETag": '"' + "0" * 64 + '"'})

    hub.faults.append(larger)
    with pytest.raises(Corrupt, match="larger than the"):
        fetch(REPO)
    assert not [path for method, path, *_ in hub.log if method == "GET" and "_blobs" in path]


def test_a_search_is_one_request(published: Manifest, hub: LoopbackHub) -> None:
    def pages(request: Request) -> Response | None:
        link = f'<{hub.url}/api/models?x=1>; rel="next"'
        return JSONResponse([], headers={"Link": link}) if request.url.path == "/api/models" else None

    hub.faults.append(pages)
    said: list[str] = []
    assert search(note=said.append) == []
    assert len(hub.log) == 1
    assert len(said) == 1 and "only the first page" in said[0]


ODD = (
    "Wed, 21 Oct 99999999999999999999 07:28:00 GMT", "Wed, 21 Oct 2026 99:28:00 GMT", "9" * 5000, "-1",
    "-9e99", "nan", "inf", "1e400", "0x10", "\xb2", "\xbd", "1_000", "+5", "5.5", "5, 5", "", ",",
    "\x7f", "0" * 5000,
    "Fri, 31 Dec 9999 23:59:59 -2359", "Mon, 01 Jan 0001 00:00:00 +2359",
    "1 Jan 2026 00:00:00 +99999999999999",
    "Wed, 21 Oct 2026 07:28:00 " + "(" * 3000, "a" * 20000,
)  # fmt: skip


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("listing", [False, True])
def test_an_odd_retry_after(hub: LoopbackHub, status: int, listing: bool) -> None:
    """Neither we nor the client, which reads it for itself, wait long or fail in another way."""
    for value in ODD:
        response = PlainTextResponse("no", status)
        response.raw_headers += [(b"retry-after", value.encode("latin-1"))] * 2
        response.raw_headers += [(b"ratelimit", b'"api";r=0;t=' + b"9" * 5000)]
        hub.faults[:] = [lambda _, response=response: response]
        waits: list[float] = []
        with impatient() as slept, pytest.raises(Unreachable, match=str(status)):
            call = (lambda: list(api().list_models(limit=1))) if listing else lambda: api().model_info("o/m")
            ask("o/m", call, sleep=waits.append)
        assert all(0 <= wait <= LONGEST_WAIT for wait in [*waits, *slept]), value


@pytest.mark.parametrize("headers", [{}, {"Retry-After": "60"}], ids=["silent", "a minute"])
def test_a_search_is_tried_as_often_as_all_else(hub: LoopbackHub, headers: dict[str, str]) -> None:
    """The client alone would make six of each of our attempts."""
    asked: list[Request] = []

    def refused(request: Request) -> Response:
        asked.append(request)
        return PlainTextResponse("no", 429, headers)

    hub.faults[:] = [refused]
    with impatient() as slept, pytest.raises(Unreachable, match="the Hub answers 429 for a search"):
        search()
    assert len(asked) == ATTEMPTS and all(wait <= LONGEST_WAIT for wait in slept)


def test_a_listing_that_reaches_nobody_is_not_tried_again_by_the_client() -> None:
    class Session:
        headers: ClassVar[dict[str, str]] = {}
        event_hooks: ClassVar[dict[str, list[Any]]] = {}

        def send(self, request: object, *, stream: bool = False) -> None:
            raise HTTPError("refused")

    session = bounds.bounded(Session())
    request = SimpleNamespace(method="GET", headers={}, extensions={})
    with bounds.task("a search", one_page=True), pytest.raises(ConnectionError, match="refused"):
        session.send(request)
    with bounds.task("o/m"), pytest.raises(HTTPError):
        session.send(request)


def test_retry_after_of_any_bytes_is_read_or_left() -> None:
    draw = random.Random(0)
    letters = "0123456789 ,:+-GMTWedOctJan()\"'\\;.eExX_\xb2\xe9\u0663\0\n"
    base = "Wed, 21 Oct 2026 07:28:00 GMT"
    for _ in range(20_000):
        text = list(draw.choice((base, "120", "")))
        for _ in range(draw.randrange(1, 8)):
            text[draw.randrange(len(text) + 1) : draw.randrange(len(text) + 1)] = draw.choice(letters) * (
                draw.choice((1, 1, 3, 25))
            )
        found = _seconds("".join(text))
        assert found is None or found >= 0
    assert _seconds(datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")) is not None


ANSWERS = (
    b"", b"<html>log in</html>", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b"{}", b'{"siblings": 3}',
    b'{"id": 3, "sha": []}', b"[" * 100_000,
    b'{"id": "o/m", "lastModified": "yesterday"}', b"[3]", b"[null]", b"1" * 9000,
)  # fmt: skip


@pytest.mark.parametrize("body", ANSWERS, ids=lambda body: body[:20].decode("latin-1"))
def test_an_answer_that_no_hub_gives_is_named_as_one(
    published: Manifest, hub: LoopbackHub, body: bytes
) -> None:
    hub.faults.append(lambda _: Response(body, media_type="application/json"))
    for call in (lambda: fetch(REPO), search):
        try:
            call()
        except KvhubError as error:
            assert isinstance(error, Corrupt), error
            assert error.hint and len(error.message) < 300


def test_what_still_downloads_when_a_pull_ends_writes_nothing_more(tmp_path: Path) -> None:
    """A thread that hangs in the network while the caller cleans up is stopped when it is back."""
    go_on, found = threading.Event(), []

    def work(_: int) -> None:
        go_on.wait(30)
        try:
            from kvhub.hub.parallel import end_if_stopped

            end_if_stopped()
            (tmp_path / "again").mkdir()
        except Stopped as stopped:
            found.append(stopped)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        for_each([1, 2], work, lambda _: None, threads=2, name="test", waiting=interrupted)
    go_on.set()
    for _ in range(100):
        if len(found) == 2:
            break
        time.sleep(0.05)
    assert len(found) == 2 and not (tmp_path / "again").exists()


def test_a_pull_that_waits_for_the_head_of_a_file_leaves_nothing(
    published: Manifest, hub: LoopbackHub, home: Settings
) -> None:
    """The client makes directories between one answer and the next request."""
    asked, go_on = threading.Event(), threading.Event()

    def hang(request: Request) -> None:
        if request.method == "HEAD" and request.url.path.endswith(published.files[0].name):
            asked.set()
            go_on.wait(30)

    def interrupted(_done: int, _total: int) -> None:
        assert asked.wait(30)
        raise KeyboardInterrupt

    hub.faults.append(hang)
    with pytest.raises(KeyboardInterrupt):
        fetch(REPO, progress=interrupted)
    go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("kvhub-pull"):
            thread.join(30)
    assert [path.name for path in home.mappers.glob(".pull-*")] == []


def test_an_interrupt_while_threads_start_stops_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    class Second(threading.Thread):
        def start(self) -> None:
            if self.name.endswith("-1"):
                raise KeyboardInterrupt
            super().start()

    def work(item: int) -> None:
        time.sleep(0.2)
        done.append(item)

    monkeypatch.setattr("kvhub.hub.parallel.threading.Thread", Second)
    with pytest.raises(KeyboardInterrupt):
        for_each(range(20), work, lambda _: None, threads=2, name="test")
    assert done == [0]  # what was under way has been waited for, nothing new was begun


def test_a_pull_sweeps_what_has_no_lock_or_one_that_nobody_holds(tmp_path: Path) -> None:
    mappers = tmp_path / "mappers"
    for name in (".pull-0123456789ab", ".pull-ba9876543210"):
        (mappers / name / ".cache").mkdir(parents=True)
    (mappers / ".pull-ba9876543210.lock").touch()
    with store.staging(mappers) as living, store.staging(mappers) as another:
        assert living.is_dir() and another.is_dir()
        assert {path.name for path in mappers.glob(".pull-*[!k]")} == {living.name, another.name}
    assert list(mappers.glob(".pull-*")) == []


def test_a_part_of_a_file_may_be_as_large_as_was_asked_for(published: Manifest, hub: LoopbackHub) -> None:
    """As data sets are read."""
    hub.faults.append(lambda _: Response(b"x" * (20 << 20), 206))
    api()
    session, url = get_session(), f"{hub.url}/datasets/o/d/resolve/main/a"
    assert len(session.get(url, headers={"Range": f"bytes=5-{5 + (20 << 20) - 1}"}).content) == 20 << 20
    with pytest.raises(Corrupt, match="larger than"):
        session.get(url, headers={"Range": f"bytes=5-{5 + (19 << 20) - 1}"})


def test_json_within_the_bound_is_read(published: Manifest, hub: LoopbackHub) -> None:
    many = [{"id": f"o/m{number}", "sha": "a" * 40, "tags": ["x" * 1000]} for number in range(200)]
    hub.faults.append(lambda r: Response(json.dumps(many)) if r.url.path == "/api/models" else None)
    assert len(search()) == 200
