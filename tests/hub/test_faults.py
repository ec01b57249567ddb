"""A conversation with the Hub in which everything goes wrong once: the real client, the loopback Hub."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from support.fuzzing import impatient
from support.published import publishable

from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import verify_artifact
from kvhub.catalog import open_registry
from kvhub.errors import AccessDenied, Corrupt, KvhubError, NotFound, Unreachable
from kvhub.hub.pull import fetch, pull
from kvhub.hub.push import push
from kvhub.settings import Settings

REPO = "tester/mapper"


@pytest.fixture
def shards(
    hub: LoopbackHub, home: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Manifest]:
    """A mapper of three shards on the Hub, and nobody who waits."""
    monkeypatch.setattr("kvhub.artifact.write.SHARD_BYTES", 1000)
    manifest = publishable(tmp_path / "made")
    assert sum(entry.name.endswith(".safetensors") for entry in manifest.files) == 3
    push(tmp_path / "made", REPO)
    hub.log.clear()
    with impatient():
        yield manifest


def nothing_was_kept(home: Settings) -> None:
    assert [path.name for path in home.mappers.glob("*") if path.name != ".lock"] == []
    with open_registry(home) as registry:
        assert registry.list() == []


def blob_of(hub: LoopbackHub, name: str) -> str:
    return str(hub.store.repos[REPO].head.tree[name].lfs)


def fetched(hub: LoopbackHub) -> Counter[str]:
    """How often each weight file was asked for."""
    return Counter(
        path.rpartition("/")[2] for method, path, *_ in hub.log if method == "GET" and "/_blobs/" in path
    )


def cut(hub: LoopbackHub, oid: str, times: int) -> Callable[[Request], Response | None]:
    """Announce all of a file from where it was asked, send a part, and close the connection."""
    left = [times]
    data = (hub.store.lfs / oid).read_bytes()

    def fault(request: Request) -> Response | None:
        if request.method != "GET" or not request.url.path.endswith(oid) or not left[0]:
            return None
        left[0] -= 1
        begin = int(request.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        rest = data[begin:]

        async def part():  # type: ignore[no-untyped-def]
            yield rest[: max(1, len(rest) // 3)]
            raise ConnectionResetError("cut")

        headers = {"Content-Length": str(len(rest)), "ETag": f'"{oid}"'}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        return StreamingResponse(part(), 206 if begin else 200, headers=headers)

    return fault


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("times", [1, 9])
def test_a_cut_in_the_middle_of_a_shard_costs_that_shard_alone(
    shards: Manifest, hub: LoopbackHub, home: Settings, times: int
) -> None:
    """Once, and more often than the client goes on by itself: then the file is begun again, no other is."""
    oid = blob_of(hub, "model-00002-of-00003.safetensors")
    hub.faults.append(cut(hub, oid, times))
    assert verify_artifact(pull(REPO), deep=True) == shards
    asked = fetched(hub)
    assert asked.pop(oid) > times
    assert set(asked.values()) == {1} and len(asked) == 2


def test_a_shard_that_is_always_cut_is_given_up(shards: Manifest, hub: LoopbackHub, home: Settings) -> None:
    hub.faults.append(cut(hub, blob_of(hub, "model-00002-of-00003.safetensors"), 10**6))
    with pytest.raises((Unreachable, Corrupt)) as caught:
        pull(REPO)
    assert caught.value.hint and caught.value.message.isprintable()
    nothing_was_kept(home)
    hub.faults.clear()
    assert verify_artifact(pull(REPO), deep=True) == shards


@pytest.mark.parametrize("where", ["/resolve/", "/_blobs/"])
def test_a_repository_deleted_between_listing_and_download(
    shards: Manifest, hub: LoopbackHub, home: Settings, where: str
) -> None:
    """Before the manifest is fetched, and after a shard has been."""
    seen: list[str] = []

    def deleted(request: Request) -> Response | None:
        if where in request.url.path:
            seen.append(request.url.path)
        if len(seen) > (where == "/_blobs/"):
            hub.store.repos.pop(REPO, None)
            for path in hub.store.lfs.iterdir():
                path.unlink()
        gone = "/_blobs/" in request.url.path and not (hub.store.lfs / request.url.path[8:]).exists()
        return PlainTextResponse("Not found", 404) if gone else None

    hub.faults.append(deleted)
    with pytest.raises((NotFound, KvhubError)) as caught:
        fetch(REPO)
    assert isinstance(caught.value, NotFound), caught.value
    nothing_was_kept(home)


def test_one_pull_that_meets_everything(shards: Manifest, hub: LoopbackHub, home: Settings) -> None:
    """A 429 with a delay, 503 twice, a cut, then a flipped byte that is refused, then all is well."""
    oid = blob_of(hub, "model-00001-of-00003.safetensors")
    left = {"/api/models/": [429], "/resolve/": [503, 503]}

    def busy(request: Request) -> Response | None:
        for part, answers in left.items():
            if part in request.url.path and answers:
                return PlainTextResponse("no", answers.pop(), headers={"Retry-After": "2"})
        return None

    hub.faults += [busy, cut(hub, oid, 1)]
    good = (hub.store.lfs / oid).read_bytes()
    (hub.store.lfs / oid).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(Corrupt, match="changed"):
        pull(REPO)
    nothing_was_kept(home)
    assert left == {"/api/models/": [], "/resolve/": []}
    (hub.store.lfs / oid).write_bytes(good)
    assert verify_artifact(pull(REPO), deep=True) == shards


def test_an_upload_that_fails_sends_the_other_shards_once(
    shards: Manifest, hub: LoopbackHub, home: Settings, tmp_path: Path
) -> None:
    for path in hub.store.lfs.iterdir():
        path.unlink()
    hub.store.repos.clear()
    bad = [shards.files[2].sha256, shards.files[2].sha256]

    def busy(request: Request) -> Response | None:
        if request.method == "PUT" and bad and request.url.path.endswith(bad[-1]):
            bad.pop()
            return PlainTextResponse("no", 503, headers={"Retry-After": "0"})
        return None

    hub.faults.append(busy)
    push(tmp_path / "made", REPO)
    sent = Counter(path.rpartition("/")[2] for method, path, *_ in hub.log if method == "PUT")
    weights = [entry.sha256 for entry in shards.files if entry.name.endswith(".safetensors")]
    assert not bad
    assert {sent[sha] for sha in weights if sha != shards.files[2].sha256} == {1}
    assert verify_artifact(pull(REPO), deep=True) == shards


@pytest.mark.parametrize(("status", "kind"), [(403, AccessDenied), (503, Unreachable), (429, Unreachable)])
def test_an_upload_that_is_always_refused_says_what_the_hub_says(
    shards: Manifest, hub: LoopbackHub, tmp_path: Path, status: int, kind: type[KvhubError]
) -> None:
    """The client wraps it in an error of its own, which names the file alone."""
    for path in hub.store.lfs.iterdir():
        path.unlink()
    hub.store.repos.clear()
    hub.faults.append(
        lambda request: (
            PlainTextResponse("no", status, headers={"Retry-After": "0"}) if request.method == "PUT" else None
        )
    )
    with pytest.raises(kind, match=str(status) if status != 403 else "forbids"):
        push(tmp_path / "made", REPO)


def test_an_endpoint_that_ends_in_a_slash(
    shards: Manifest, hub: LoopbackHub, home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.url}/")
    assert verify_artifact(pull(REPO), deep=True) == shards
