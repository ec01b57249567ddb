"""Errors of the real client in our words, and when it asks again."""

from __future__ import annotations

import errno
import logging
import socket
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from loopback_hub import LoopbackHub
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from support.published import publishable

from kvhub.errors import AccessDenied, Corrupt, KvhubError, NotFound, Unreachable
from kvhub.hub.client import ATTEMPTS, LONGEST_WAIT, api, ask, explain
from kvhub.hub.pull import pull
from kvhub.hub.push import push
from kvhub.hub.search import search
from kvhub.model.resolve import explained as model_explained
from kvhub.settings import Settings


def test_a_hub_that_does_not_listen_is_tried_a_few_times() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        dead = HfApi(endpoint=f"http://127.0.0.1:{probe.getsockname()[1]}")
    waits: list[float] = []
    with pytest.raises(Unreachable, match="cannot reach"):
        ask("o/m", lambda: dead.model_info("o/m"), sleep=waits.append)
    assert len(waits) == ATTEMPTS - 1
    assert sum(waits) < 10


@pytest.mark.parametrize(("header", "expected"), [("0", [0.0] * 3), ("7", [7.0] * 3), ("86400", [])])
def test_retry_after_is_honoured_up_to_a_bound(hub: LoopbackHub, header: str, expected: list[float]) -> None:
    hub.faults.append(lambda _: PlainTextResponse("no", 429, headers={"Retry-After": header}))
    waits: list[float] = []
    with pytest.raises(Unreachable, match="429"):
        ask("o/m", lambda: api().model_info("o/m"), sleep=waits.append)
    assert waits == expected
    assert LONGEST_WAIT < 86400


@pytest.mark.parametrize("status", [400, 402, 405, 413, 422])
def test_other_refusals_are_final(hub: LoopbackHub, status: int) -> None:
    hub.faults.append(lambda _: PlainTextResponse("no", status))
    with pytest.raises(KvhubError, match=str(status)):
        ask("o/m", lambda: api().model_info("o/m"), sleep=lambda _: pytest.fail("waited"))


def test_reasons_below_the_clients_own_wrapping_are_found() -> None:
    wrapped = LocalEntryNotFoundError("look at your connection")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert "disk is full" in explain(wrapped, "o/m").message
    assert isinstance(explain(LocalEntryNotFoundError("x"), "o/m"), KvhubError)
    assert "HF_HUB_OFFLINE" in explain(OfflineModeIsEnabled("off"), "o/m").hint
    assert "HF_HUB_DISABLE_XET" in explain(ConnectionError("/xet-write-token/main"), "o/m").hint
    assert isinstance(explain(PermissionError(errno.EACCES, "no", "/x"), "o/m"), AccessDenied)
    assert "\n" not in explain(RuntimeError("one\ntwo"), "o/m").message


def test_our_own_errors_pass_through() -> None:
    def fail() -> None:
        raise AccessDenied("ours")

    with pytest.raises(AccessDenied, match="ours"):
        ask("o/m", fail, sleep=lambda _: pytest.fail("waited"))


@pytest.mark.parametrize(("seconds", "waited"), [(-60, True), (30, True), (86400, False)])
def test_retry_after_may_be_a_date(hub: LoopbackHub, seconds: int, waited: bool) -> None:
    when = format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)
    hub.faults.append(lambda _: PlainTextResponse("no", 503, headers={"Retry-After": when}))
    waits: list[float] = []
    with pytest.raises(Unreachable, match="503"):
        ask("o/m", lambda: api().model_info("o/m"), sleep=waits.append)
    assert len(waits) == (ATTEMPTS - 1 if waited else 0)
    least, most = (0.0, 0.0) if seconds < 0 else (10.0, 30.0)
    assert all(least <= wait <= most for wait in waits)


def test_a_cache_that_may_not_be_written_is_no_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    read_only = OSError(errno.EROFS, "Read-only file system", str(cache))
    for found in (model_explained(read_only, "o/m", None), explain(read_only, "o/m")):
        assert isinstance(found, AccessDenied) and str(cache) in found.message and found.hint
    wrapped = PermissionError(errno.EACCES, "Permission denied")
    assert str(cache) in model_explained(wrapped, "o/m", None).message
    full = model_explained(OSError(errno.ENOSPC, "No space left on device"), "o/m", None)
    assert not isinstance(full, AccessDenied) and "free some disk space" in full.hint


def test_a_commit_that_is_none(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    """No revision was asked for, so none is blamed."""
    publishable(tmp_path / "made")
    push(tmp_path / "made", "tester/mapper")
    sha = hub.store.repos["tester/mapper"].head.sha
    hub.faults.append(lambda r: _renamed(hub, r, "f" * 40))
    with pytest.raises(NotFound) as caught:
        pull("tester/mapper")
    assert "None" not in caught.value.message and caught.value.hint
    hub.faults[:] = [lambda r: _renamed(hub, r, "../../main")]
    with pytest.raises(Corrupt, match="names no commit"):
        pull("tester/mapper")
    assert hub.store.repos["tester/mapper"].head.sha == sha


def _renamed(hub: LoopbackHub, request: Request, sha: str) -> JSONResponse | None:
    """What the Hub says of a repository, at another commit."""
    if request.url.path != "/api/models/tester/mapper":
        return None
    repo = hub.store.repos["tester/mapper"]
    siblings = [
        {"rfilename": name, "size": entry.size, "blobId": entry.oid} for name, entry in repo.head.tree.items()
    ]
    return JSONResponse(hub.store.description(repo, repo.head) | {"sha": sha, "siblings": siblings})


def test_the_clients_own_warnings_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils.logging import get_verbosity, set_verbosity

    before = get_verbosity()
    try:
        monkeypatch.delenv("HF_HUB_VERBOSITY", raising=False)
        set_verbosity(logging.WARNING)
        api()
        assert get_verbosity() == logging.CRITICAL
        monkeypatch.setenv("HF_HUB_VERBOSITY", "info")
        set_verbosity(logging.INFO)
        api()
        assert get_verbosity() == logging.INFO
    finally:
        set_verbosity(before)


def test_a_search_says_what_it_did_not_look_at(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    publishable(tmp_path / "made")
    for name in ("a", "b", "c"):
        push(tmp_path / "made", f"tester/{name}")
    said: list[str] = []
    assert len(search(limit=3, note=said.append)) == 3 and said == []
    assert len(search(limit=2, note=said.append)) == 2
    assert len(said) == 1 and "only the 2 repositories" in said[0]
