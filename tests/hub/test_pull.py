"""From the Hub into an empty home: what arrives, and everything that must not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from loopback_hub.store import Repo
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from support.published import flipped, make_artifact, make_evidence, publishable

from kvhub.artifact.evidence import write_evidence
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import verify_artifact
from kvhub.catalog import find, open_registry
from kvhub.errors import AccessDenied, BadInput, Corrupt, Incompatible, KvhubError, NotFound, Unreachable
from kvhub.hub.pull import fetch, pull
from kvhub.hub.push import push
from kvhub.settings import Settings
from kvhub_registry import State

REPO = "tester/mapper"


def nothing_was_kept(home: Settings) -> None:
    """No row, no directory, nothing staged."""
    if home.mappers.exists():
        assert [path.name for path in home.mappers.iterdir() if path.name != ".lock"] == []
    with open_registry(home) as registry:
        assert registry.list() == []


def repo(hub: LoopbackHub) -> Repo:
    return hub.store.repos[REPO]


def damage(hub: LoopbackHub, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change the stored bytes of a file behind the Hub's back."""
    path = hub.store.blob(repo(hub).head.tree[name])
    path.write_bytes(change(path.read_bytes()))


def test_push_then_pull_gives_the_same_bytes_and_a_ready_row(
    published: Manifest, hub: LoopbackHub, home: Settings, tmp_path: Path
) -> None:
    path = pull(REPO)
    assert path == home.mappers / published.digest
    assert verify_artifact(path, deep=True) == published
    names = {entry.name for entry in published.files} | {"manifest.json", "evidence.json"}
    assert {item.name for item in path.iterdir()} == names
    for name in names:
        assert (path / name).read_bytes() == (tmp_path / "made" / name).read_bytes()
    row = find(REPO, home)
    assert (row.state, row.score("top1")) == (State.READY, 0.95)
    assert "passes the gate" in row.state_reason
    assert [(place.commit, place.pushed) for place in row.locations] == [(repo(hub).head.sha, False)]
    assert {item.name for item in home.mappers.iterdir()} <= {published.digest, ".lock"}


def test_everything_comes_from_the_one_commit_that_was_resolved(
    published: Manifest, hub: LoopbackHub, home: Settings
) -> None:
    pull(REPO, "main")
    resolved = [path for _, path, _, _ in hub.log if "/resolve/" in path]
    assert resolved
    assert all(f"/resolve/{repo(hub).head.sha}/" in path for path in resolved)
    assert not any("README" in path for path in resolved)
    assert not any(token for _, path, token, _ in hub.log if "/_blobs/" in path)


def test_an_older_revision_stays_available_by_tag_and_commit(
    hub: LoopbackHub, home: Settings, tmp_path: Path
) -> None:
    first = publishable(tmp_path / "a", seed=1)
    commit = push(tmp_path / "a", REPO, tag="v1").commit
    second = publishable(tmp_path / "b", seed=2)
    push(tmp_path / "b", REPO)
    assert fetch(REPO, "v1").digest == fetch(REPO, commit).digest == first.digest
    assert fetch(REPO).digest == second.digest
    assert find(REPO, home).digest == second.digest


def test_pulling_again_downloads_no_weights(published: Manifest, hub: LoopbackHub, home: Settings) -> None:
    first = pull(REPO)
    hub.log.clear()
    assert pull(REPO) == first
    assert not any("safetensors" in path or "/_blobs/" in path for _, path, _, _ in hub.log)
    assert find(published.digest, home).state is State.READY


def test_evidence_that_fails_our_gate_gives_a_draft_whatever_it_claims(
    hub: LoopbackHub, home: Settings, tmp_path: Path
) -> None:
    manifest = make_artifact(tmp_path / "made")
    evidence = make_evidence(manifest, top1=0.5)
    write_evidence(
        tmp_path / "made",
        evidence.model_copy(update={"verdict": evidence.verdict.model_copy(update={"passed": True})}),
    )
    push(tmp_path / "made", REPO, allow_unevaluated=True)
    row = fetch(REPO)
    assert row.state is State.DRAFT
    assert "does not pass" in row.state_reason


def test_no_evidence_gives_a_draft(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    make_artifact(tmp_path / "made")
    push(tmp_path / "made", REPO, allow_unevaluated=True)
    assert fetch(REPO).state is State.DRAFT


def test_evidence_of_another_mapper_is_refused(
    published: Manifest, hub: LoopbackHub, home: Settings, tmp_path: Path
) -> None:
    other = make_artifact(tmp_path / "other", seed=7)
    hub.store.put_file(REPO, "evidence.json", make_evidence(other).to_bytes())
    with pytest.raises(Corrupt, match="another mapper"):
        pull(REPO)
    nothing_was_kept(home)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json", "evidence.json"])
def test_a_byte_flipped_at_rest_on_the_hub_is_refused(
    published: Manifest, hub: LoopbackHub, home: Settings, name: str
) -> None:
    damage(hub, name, flipped)  # the client itself accepts this over plain HTTP
    with pytest.raises(Corrupt):
        pull(REPO)
    nothing_was_kept(home)


def test_a_manifest_changed_at_rest_is_refused_without_evidence_too(
    hub: LoopbackHub, home: Settings, tmp_path: Path
) -> None:
    make_artifact(tmp_path / "made")
    push(tmp_path / "made", REPO, allow_unevaluated=True)
    damage(hub, "manifest.json", lambda data: data.replace(b'"exact_prefix":0', b'"exact_prefix":4'))
    with pytest.raises(Corrupt, match="not what was committed"):
        pull(REPO)
    nothing_was_kept(home)


def test_a_truncated_file_is_refused(published: Manifest, hub: LoopbackHub, home: Settings) -> None:
    damage(hub, "model.safetensors", lambda data: data[: len(data) // 2])
    with pytest.raises((Corrupt, Unreachable)):
        pull(REPO)
    nothing_was_kept(home)


def test_a_missing_file_is_refused_before_anything_large_is_fetched(
    published: Manifest, hub: LoopbackHub, home: Settings
) -> None:
    hub.store.drop_file(REPO, "config.json")
    with pytest.raises(Corrupt, match=r"lacks config\.json"):
        pull(REPO)
    assert not any("/_blobs/" in path for _, path, _, _ in hub.log)
    nothing_was_kept(home)


def test_extra_files_are_never_fetched(published: Manifest, hub: LoopbackHub, home: Settings) -> None:
    for name in ("evil.pkl", "model-00002-of-00002.safetensors", "sub/evidence.json", "modeling.py"):
        hub.store.put_file(REPO, name, b"x" * 100)
    path = pull(REPO)
    assert verify_artifact(path, deep=True) == published
    assert not any(word in str(hub.log) for word in ("evil", "modeling", "00002-of"))


@pytest.mark.parametrize(
    "name",
    ["../../evil.safetensors", "/etc/evil", "a/b.safetensors", "..", "con\\..\\x", ".hidden", "x" * 300],
)
def test_a_manifest_cannot_name_a_file_elsewhere(
    published: Manifest, hub: LoopbackHub, home: Settings, name: str
) -> None:
    content = json.loads(published.to_bytes())
    content["files"][0]["name"] = name
    data = json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    hub.store.put_file(REPO, "manifest.json", data)
    hub.store.put_file(REPO, name, b"evil")
    with pytest.raises(Corrupt):
        pull(REPO)
    nothing_was_kept(home)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"\xff\xfe", b'{"a":1,"a":2}', b"[" * 100_000, b'{"schema_version":1}']
)
def test_a_hostile_manifest_is_one_line(
    published: Manifest, hub: LoopbackHub, home: Settings, data: bytes
) -> None:
    hub.store.put_file(REPO, "manifest.json", data)
    with pytest.raises(Corrupt) as caught:
        pull(REPO)
    assert "\n" not in caught.value.message
    nothing_was_kept(home)


def test_a_manifest_of_the_future_asks_for_an_upgrade(
    published: Manifest, hub: LoopbackHub, home: Settings
) -> None:
    data = published.to_bytes().replace(b'"schema_version":1', b'"schema_version":2')
    hub.store.put_file(REPO, "manifest.json", data)
    with pytest.raises(Incompatible):
        pull(REPO)
    nothing_was_kept(home)


def test_an_oversized_manifest_is_not_even_fetched(
    published: Manifest, hub: LoopbackHub, home: Settings
) -> None:
    hub.store.put_file(REPO, "manifest.json", b" " * (5 << 20))
    with pytest.raises(Corrupt, match="larger"):
        pull(REPO)
    assert not any("/resolve/" in path for _, path, _, _ in hub.log)
    nothing_was_kept(home)


def test_a_repository_of_something_else(hub: LoopbackHub, home: Settings) -> None:
    hub.store.repos["tester/other"] = other = Repo("tester/other")
    other.add({"model.safetensors": hub.store.put(b"weights")}, "initial")
    with pytest.raises(NotFound, match="not a mapper"):
        pull("tester/other")
    nothing_was_kept(home)


def test_who_is_turned_away(
    published: Manifest, hub: LoopbackHub, home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFound, match="no repository"):
        pull("tester/absent")
    with pytest.raises(NotFound, match="no revision 'v9'"):
        pull(REPO, "v9")
    hub.store.repos["someone/gated"] = gated = Repo("someone/gated", gated=True)
    gated.add(dict(repo(hub).head.tree), "initial")
    with pytest.raises(AccessDenied, match="gated"):
        pull("someone/gated")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(AccessDenied, match="token") as caught:
        pull(REPO)
    assert "hf_wrong" not in f"{caught.value.message}{caught.value.hint}"
    nothing_was_kept(home)


def test_a_private_repository_needs_a_token(
    published: Manifest, hub: LoopbackHub, home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo(hub).private = True
    assert pull(REPO)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(NotFound, match="that you may see"):
        pull(REPO)


@pytest.mark.parametrize("name", ["mapper", "a/b/c", "../x", "a/..", "a/b@", "a/b@../x", "http://h/a/b", ""])
def test_a_name_that_is_none(name: str, home: Settings) -> None:
    from kvhub.hub.client import split

    with pytest.raises(BadInput):
        split(name)


def answering(status: int, times: int, part: str, **headers: str) -> Callable[[Request], Response | None]:
    """A fault: `times` answers of `status` to paths that contain `part`."""
    left = [times]

    def fault(request: Request) -> Response | None:
        if part not in request.url.path or left[0] == 0:
            return None
        left[0] -= 1
        return PlainTextResponse("no", status, headers=headers)

    return fault


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_asked_again(
    published: Manifest, hub: LoopbackHub, home: Settings, status: int
) -> None:
    hub.faults.append(answering(status, 2, "/api/models/", **{"Retry-After": "0"}))
    assert pull(REPO)
    assert [code for _, path, _, code in hub.log if path.startswith("/api/models/")][:3] == [
        status,
        status,
        200,
    ]


def test_a_hub_that_stays_busy_is_given_up(published: Manifest, hub: LoopbackHub, home: Settings) -> None:
    hub.faults.append(answering(503, 99, "/api/models/", **{"Retry-After": "0"}))
    with pytest.raises(Unreachable, match="503"):
        pull(REPO)
    assert len(hub.log) == 4
    nothing_was_kept(home)


def test_a_refusal_is_final(published: Manifest, hub: LoopbackHub, home: Settings) -> None:
    hub.faults.append(answering(403, 99, "/api/models/"))
    with pytest.raises(AccessDenied):
        pull(REPO)
    assert len(hub.log) == 1


def test_a_disk_that_is_too_small_is_noticed_first(
    published: Manifest, hub: LoopbackHub, home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvhub.hub import store

    monkeypatch.setattr(store, "free_bytes", lambda _directory: 1 << 20)
    with pytest.raises(KvhubError, match="MB free"):
        pull(REPO)
    assert not any("/_blobs/" in path for _, path, _, _ in hub.log)
    nothing_was_kept(home)


def test_a_registry_that_cannot_be_written_leaves_no_files(
    published: Manifest, hub: LoopbackHub, home: Settings
) -> None:
    home.home.mkdir(exist_ok=True)
    (home.home / "registry.db").unlink(missing_ok=True)
    (home.home / "registry.db").write_bytes(b"garbage, not a database" * 50)
    with pytest.raises(Corrupt, match="registry"):
        pull(REPO)
    assert [path.name for path in home.mappers.iterdir() if path.name != ".lock"] == []


def test_what_a_killed_pull_left_is_swept(published: Manifest, hub: LoopbackHub, home: Settings) -> None:
    left = home.mappers / ".pull-0123456789ab"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    left.with_suffix(".lock").touch()
    pull(REPO)
    assert {item.name for item in home.mappers.iterdir()} <= {published.digest, ".lock"}
