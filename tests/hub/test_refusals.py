"""What a pull refuses in odd places: offline, by a lock that contradicts itself; and how a no is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants
from loopback_hub import LoopbackHub
from starlette.responses import PlainTextResponse

from kvhub.artifact.manifest import Manifest
from kvhub.catalog import find
from kvhub.errors import AccessDenied, Corrupt, Incompatible, KvhubError, NotFound
from kvhub.hub.client import explain
from kvhub.hub.locked import pull_locked
from kvhub.hub.lockfile import make_lock, write_lock
from kvhub.hub.pull import fetch
from kvhub.hub.search import search
from kvhub.settings import Settings

REPO = "tester/mapper"


def test_a_signature_is_demanded_offline_too(
    published: Manifest, home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(REPO).digest == published.digest
    monkeypatch.setenv("KVHUB_REQUIRE_SIGNATURE", "1")
    with pytest.raises(Incompatible, match="not signed") as refused:
        fetch(REPO)
    assert refused.value.code == "signature"


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("change", ["sha256", "size", "a file less", "a file twice"])
def test_a_lock_that_contradicts_the_manifest(
    published: Manifest,
    hub: LoopbackHub,
    home: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    here: bool,
    change: str,
) -> None:
    path = tmp_path / "kvhub.lock"
    fetch(REPO)
    write_lock(path, make_lock([(find(REPO, home), published)]))
    content = json.loads(path.read_bytes())
    files = content["mappers"][0]["files"]
    if change == "sha256":
        files[0]["sha256"] = "0" * 64
    elif change == "size":
        files[-1]["size"] += 1
    elif change == "a file less":
        del files[0]
    else:
        files.append(files[0])
    path.write_text(json.dumps(content))
    if not here:
        monkeypatch.setenv("KVHUB_HOME", str(tmp_path / "other"))
    hub.log.clear()
    with pytest.raises(Corrupt, match=r"kvhub.lock: .* is not as its manifest has it"):
        pull_locked(path)
    assert not [asked for _, asked, *_ in hub.log if "_blobs" in asked], "weights were fetched"
    if not here:
        left = [one.name for one in (tmp_path / "other" / "mappers").glob("*") if one.name != ".lock"]
        assert left == []
        with pytest.raises(NotFound):
            find(published.digest[:12])


@pytest.mark.parametrize(
    ("status", "kind", "message", "hint"),
    [
        (404, NotFound, "there is no search at this Hub", "HF_ENDPOINT"),
        (403, AccessDenied, "the Hub forbids a search", "that may read there"),
        (401, AccessDenied, "does not accept the token for a search", "HF_TOKEN"),
    ],
)
def test_a_search_that_is_refused(
    hub: LoopbackHub, status: int, kind: type[KvhubError], message: str, hint: str
) -> None:
    hub.faults.append(lambda _: PlainTextResponse("", status))
    with pytest.raises(kind, match=message) as refused:
        search()
    assert hint in refused.value.hint and "write" not in refused.value.hint


def test_a_pull_that_is_forbidden_asks_for_no_right_to_write(published: Manifest, hub: LoopbackHub) -> None:
    hub.faults.append(lambda _: PlainTextResponse("", 403))
    with pytest.raises(AccessDenied, match=f"forbids this on {REPO}") as refused:
        fetch(REPO)
    assert "may read" in refused.value.hint


def test_a_push_that_is_forbidden_asks_for_the_right_to_write() -> None:
    class Response:
        status_code = 403
        request = type("Request", (), {"method": "POST"})

    class Refused(Exception):
        response = Response()

    assert "right to write" in explain(Refused(), "o/m").hint
