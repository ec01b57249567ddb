"""To the Hub: what is sent, what is refused, and whose work is not overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from loopback_hub import LoopbackHub
from loopback_hub.store import Repo, front_matter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from support.published import make_artifact, publishable

from kvhub.catalog import find, register
from kvhub.errors import AccessDenied, BadInput, Corrupt, Incompatible, KvhubError
from kvhub.hub.client import split
from kvhub.hub.push import push
from kvhub.hub.reference import parse
from kvhub.settings import Settings

REPO = "tester/mapper"


def card_of(hub: LoopbackHub) -> str:
    return hub.store.blob(hub.store.repos[REPO].head.tree["README.md"]).read_text()


def test_what_a_push_leaves_on_the_hub(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    manifest = publishable(tmp_path / "made", source="Qwen/Qwen3-8B", target="Qwen/Qwen3-32B")
    register(tmp_path / "made", manifest)
    pushed = push(tmp_path / "made", REPO, tag="v1", private=True, message="first")
    repo = hub.store.repos[REPO]
    assert (pushed.commit, repo.tags, repo.private, repo.head.title) == (
        repo.head.sha,
        {"v1": repo.head.sha},
        True,
        "first",
    )
    listed = {entry.name for entry in manifest.files}
    assert set(repo.head.tree) == listed | {"README.md", "manifest.json", "evidence.json", ".gitattributes"}
    row = find(manifest.digest, home)
    assert [(place.repo_id, place.commit, place.pushed) for place in row.locations] == [
        (REPO, pushed.commit, True)
    ]
    tags = hub.store.description(repo, repo.head)["tags"]
    assert isinstance(tags, list)
    assert {"kvhub", "kvhub-source:qwen3-8b", "kvhub-target:qwen3-32b"} <= set(tags)
    assert "base_model:adapter:Qwen/Qwen3-32B" in tags
    assert not any(token for _, path, token, _ in hub.log if "/_blobs/" in path)


@pytest.mark.parametrize("folder", ["", "sub"])
def test_a_licence_stays_until_another_is_given(
    hub: LoopbackHub, home: Settings, tmp_path: Path, folder: str
) -> None:
    def declared() -> object:
        repo = hub.store.repos[REPO]
        readme = hub.store.blob(repo.head.tree[f"{folder}/README.md".lstrip("/")]).read_text()
        return yaml.safe_load(front_matter(readme)).get("license")

    for seed, given, expected in ((1, "mit", "mit"), (2, None, "mit"), (3, "apache-2.0", "apache-2.0")):
        publishable(tmp_path / str(seed), seed=seed)
        pushed = push(tmp_path / str(seed), REPO, subfolder=folder, licence=given)
        assert pushed.licence == expected == declared()


@pytest.mark.parametrize("text", ["o/m@{}", "o/m/{}", "{}", "o/{}", "o/m@v1/{}", "{}@{}"])
def test_a_long_reference_is_not_echoed_whole(
    hub: LoopbackHub, home: Settings, tmp_path: Path, text: str
) -> None:
    reference = text.replace("{}", "a" * 100_000)
    for call in (
        lambda: parse(reference),
        lambda: parse(reference, revision="b" * 100_000),
        lambda: parse(reference, subfolder="b" * 100_000),
        lambda: parse("o/m", revision="b" * 100_000),
        lambda: push(tmp_path, reference),
        lambda: split(reference),
    ):
        with pytest.raises(BadInput) as caught:
            call()
        assert len(caught.value.message) + len(caught.value.hint) < 700


def test_pushing_the_same_again_makes_no_commit(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    publishable(tmp_path / "made")
    first = push(tmp_path / "made", REPO, tag="v1")
    assert push(tmp_path / "made", REPO, tag="v1").commit == first.commit
    assert len(hub.store.repos[REPO].commits) == 2


def test_a_tag_never_moves(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    for seed in (1, 2):
        publishable(tmp_path / str(seed), seed=seed)
    first = push(tmp_path / "1", REPO, tag="v1")
    push(tmp_path / "2", REPO)
    with pytest.raises(BadInput, match="tag 'v1' already"):
        push(tmp_path / "2", REPO, tag="v1")
    assert hub.store.repos[REPO].tags == {"v1": first.commit}


def test_a_new_mapper_takes_the_place_of_the_old_one(
    hub: LoopbackHub, home: Settings, tmp_path: Path
) -> None:
    publishable(tmp_path / "old")
    push(tmp_path / "old", REPO)
    hub.store.put_file(REPO, "model-00002-of-00002.safetensors", b"of an earlier one")
    hub.store.put_file(REPO, "notes.txt", b"the author's own")
    make_artifact(tmp_path / "new", seed=3)
    push(tmp_path / "new", REPO, allow_unevaluated=True)
    tree = hub.store.repos[REPO].head.tree
    assert "model-00002-of-00002.safetensors" not in tree
    assert "evidence.json" not in tree
    assert "notes.txt" in tree


def test_a_mapper_without_evidence_needs_saying_so(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    make_artifact(tmp_path / "made")
    with pytest.raises(Incompatible) as caught:
        push(tmp_path / "made", REPO)
    assert caught.value.code == "unevaluated"
    assert hub.log == []
    push(tmp_path / "made", REPO, allow_unevaluated=True)
    assert "Not evaluated" in card_of(hub)


def test_a_damaged_mapper_never_leaves(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    publishable(tmp_path / "made")
    weights = tmp_path / "made" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(Corrupt, match="sha256"):
        push(tmp_path / "made", REPO)
    assert hub.log == []


def test_a_repository_of_something_else_is_not_overwritten(
    hub: LoopbackHub, home: Settings, tmp_path: Path
) -> None:
    hub.store.repos[REPO] = repo = Repo(REPO)
    before = repo.add({"model.safetensors": hub.store.put(b"a model")}, "a model").sha
    publishable(tmp_path / "made")
    with pytest.raises(BadInput, match="no mapper"):
        push(tmp_path / "made", REPO)
    assert repo.head.sha == before


def test_somebody_elses_push_is_not_overwritten(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    publishable(tmp_path / "made")
    publishable(tmp_path / "other", seed=5)
    push(tmp_path / "other", REPO)

    def meanwhile(request: Request) -> Response | None:
        if "/preupload/" in request.url.path:
            hub.store.put_file(REPO, "notes.txt", b"pushed by somebody else just now")
        return None

    hub.faults.append(meanwhile)
    with pytest.raises(KvhubError, match="in the meantime"):
        push(tmp_path / "made", REPO)
    assert hub.store.repos[REPO].head.title == "add notes.txt"


def test_a_busy_commit_is_sent_again(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    publishable(tmp_path / "made")
    left = [2]

    def busy(request: Request) -> Response | None:
        if "/commit/" not in request.url.path or not left[0]:
            return None
        left[0] -= 1
        return PlainTextResponse("no", 503, headers={"Retry-After": "0"})

    hub.faults.append(busy)
    assert push(tmp_path / "made", REPO).commit == hub.store.repos[REPO].head.sha
    assert left == [0]


def test_who_may_not(
    hub: LoopbackHub, home: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publishable(tmp_path / "made")
    with pytest.raises(AccessDenied, match="forbids"):
        push(tmp_path / "made", "somebody/mapper")
    with pytest.raises(BadInput):
        push(tmp_path / "made", REPO + "@v1")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(AccessDenied, match="token"):
        push(tmp_path / "made", REPO)
    assert hub.store.repos == {}


def test_the_card_on_the_hub_is_valid(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    manifest = publishable(tmp_path / "made")
    push(tmp_path / "made", REPO)
    front = yaml.safe_load(front_matter(card_of(hub)) or "")
    assert front["kvhub"]["digest"] == manifest.digest
    from huggingface_hub import ModelCard

    results = ModelCard(card_of(hub)).data.eval_results
    assert results
    assert {result.metric_type for result in results} >= {"top1", "attention_cosine"}


def test_a_taken_tag_is_refused_before_anything_is_written(
    hub: LoopbackHub, home: Settings, tmp_path: Path
) -> None:
    """Even where the tag is at the head: another mapper's commit would leave it behind."""
    for number in (1, 2):
        publishable(tmp_path / str(number), seed=number)
    first = push(tmp_path / "1", REPO, tag="v1")
    before = len(hub.store.repos[REPO].commits)
    with pytest.raises(BadInput, match="has a tag 'v1' already"):
        push(tmp_path / "2", REPO, tag="v1")
    repo = hub.store.repos[REPO]
    assert repo.tags == {"v1": first.commit} and len(repo.commits) == before


@pytest.mark.parametrize(
    "tag",
    ["bad tag", "../x", "-", "", "v\N{LATIN SMALL LETTER E WITH ACUTE}", "x" * 300, "a..b", "v1/", "v1.lock"],
)
def test_a_tag_that_pull_could_not_read_is_refused_before_anything_is_sent(
    hub: LoopbackHub, home: Settings, tmp_path: Path, tag: str
) -> None:
    publishable(tmp_path / "made")
    with pytest.raises(BadInput, match="cannot be a tag"):
        push(tmp_path / "made", REPO, tag=tag)
    assert hub.log == []
    with pytest.raises(BadInput, match="not a revision"):
        parse(f"{REPO}@{tag}")


def test_a_taken_tag_is_refused_where_the_card_alone_would_differ(
    hub: LoopbackHub, home: Settings, tmp_path: Path
) -> None:
    publishable(tmp_path / "made")
    first = push(tmp_path / "made", REPO, tag="v1", licence="apache-2.0")
    with pytest.raises(
        BadInput, match=rf"tag 'v1' already, at commit {first.commit[:8]}, and README\.md would"
    ):
        push(tmp_path / "made", REPO, tag="v1", licence="mit")
    repo = hub.store.repos[REPO]
    assert repo.head.sha == first.commit and "license: apache-2.0" in card_of(hub)
    assert push(tmp_path / "made", REPO, tag="v2", licence="apache-2.0").commit == first.commit
    assert repo.tags == {"v1": first.commit, "v2": first.commit}


def test_a_tag_that_somebody_sets_meanwhile(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    publishable(tmp_path / "made")

    def meanwhile(request: Request) -> Response | None:
        if "/tag/" in request.url.path:
            repo = hub.store.repos[REPO]
            repo.tags.setdefault("v1", next(iter(repo.commits)))
        return None

    hub.faults.append(meanwhile)
    with pytest.raises(BadInput, match="taken meanwhile"):
        push(tmp_path / "made", REPO, tag="v1")


def test_a_repository_of_somebody_else_on_a_hub_of_ones_own(
    hub: LoopbackHub, home: Settings, tmp_path: Path
) -> None:
    hub.store.repos["somebody/mapper"] = repo = Repo("somebody/mapper")
    repo.add({}, "theirs")
    publishable(tmp_path / "made")
    with pytest.raises(AccessDenied, match="forbids"):
        push(tmp_path / "made", "somebody/mapper")


def test_a_hub_without_xet_storage_is_pushed_to_all_the_same(
    hub: LoopbackHub, home: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    publishable(tmp_path / "made")
    assert push(tmp_path / "made", REPO).commit == hub.store.repos[REPO].head.sha
    assert huggingface_hub.constants.HF_HUB_DISABLE_XET is False
    assert len([path for _, path, _, _ in hub.log if "xet-write-token" in path]) <= 1
