"""Several mappers in one repository: each in a folder, found by folder, by digest and by search."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback_hub import LoopbackHub
from loopback_hub.store import front_matter
from support.published import make_artifact, publishable

from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import verify_artifact
from kvhub.catalog import find, open_registry
from kvhub.errors import BadInput, Corrupt, KvhubError, NotFound
from kvhub.hub.locked import pull_locked
from kvhub.hub.lockfile import make_lock, read_lock, write_lock
from kvhub.hub.pull import fetch, here, pull
from kvhub.hub.push import push
from kvhub.hub.reference import Reference, folder, is_place, parse
from kvhub.hub.search import search
from kvhub.mapper.load import load_mapper
from kvhub.settings import Settings

REPO = "tester/family"


@pytest.fixture
def family(hub: LoopbackHub, home: Settings, tmp_path: Path) -> list[Manifest]:
    """Two mappers in folders that were named by their pairs."""
    made = []
    for number, (source, target) in enumerate((("org/A-1B", "org/B-7B"), ("org/B-7B", "org/A-1B"))):
        made.append(publishable(tmp_path / str(number), seed=number, source=source, target=target))
        push(tmp_path / str(number), REPO, subfolder="auto")
    hub.log.clear()
    return made


def root_card(hub: LoopbackHub) -> tuple[dict, str]:  # type: ignore[type-arg]
    text = hub.store.blob(hub.store.repos[REPO].head.tree["README.md"]).read_text()
    return yaml.safe_load(front_matter(text) or ""), text


def test_what_such_a_repository_holds(family: list[Manifest], hub: LoopbackHub) -> None:
    tree = hub.store.repos[REPO].head.tree
    for place in ("a-1b-to-b-7b", "b-7b-to-a-1b"):
        assert {f"{place}/{name}" for name in ("manifest.json", "model.safetensors", "README.md")} <= set(
            tree
        )
    assert "manifest.json" not in tree
    front, text = root_card(hub)
    assert [(m["folder"], m["digest"]) for m in front["kvhub"]["mappers"]] == [
        ("a-1b-to-b-7b", family[0].digest),
        ("b-7b-to-a-1b", family[1].digest),
    ]
    assert {"kvhub-source:a-1b", "kvhub-source:b-7b", "kvhub-target:a-1b"} <= set(front["tags"])
    assert f"kvhub pull {REPO}/a-1b-to-b-7b" in text
    inner = hub.store.blob(tree["a-1b-to-b-7b/README.md"]).read_text()
    assert f"kvhub serve org/B-7B --mapper {REPO}/a-1b-to-b-7b" in inner


def test_by_folder_by_digest_and_by_name_afterwards(
    family: list[Manifest], hub: LoopbackHub, home: Settings
) -> None:
    first, second = family
    path = pull(f"{REPO}/a-1b-to-b-7b")
    assert verify_artifact(path, deep=True) == first
    assert not any("b-7b-to-a-1b" in path for _, path, _, _ in hub.log)
    row = fetch(f"{REPO}/{second.digest[:10]}")
    assert (row.digest, row.locations[-1].repo_id) == (second.digest, f"{REPO}/b-7b-to-a-1b")
    assert {item.name for item in home.mappers.iterdir()} == {first.digest, second.digest, ".lock"}
    assert find(f"{REPO}/b-7b-to-a-1b", home).digest == second.digest
    known = here(Reference(REPO, second.digest[:8]), home)
    assert known is not None and known.digest == second.digest
    assert here(Reference("tester/other", second.digest[:8]), home) is None
    hub.log.clear()
    assert load_mapper(REPO, subfolder="a-1b-to-b-7b").manifest == first
    assert load_mapper(f"{REPO}/{second.digest}").manifest == second
    assert hub.log == []


def test_a_folder_that_is_none_says_which_there_are(family: list[Manifest], home: Settings) -> None:
    for wanted, said in (
        ("", "2 mappers"),
        ("/nothing", "no mapper in nothing"),
        ("/abcdef", "has the digest"),
    ):
        with pytest.raises(NotFound, match=said) as caught:
            fetch(REPO + wanted)
        assert caught.value.hint
    with pytest.raises(NotFound, match="no mapper in a-1b"):
        fetch(REPO + "/a-1b")


def test_a_lying_card_gives_nothing_else(family: list[Manifest], hub: LoopbackHub, home: Settings) -> None:
    front, _ = root_card(hub)
    for entry, other in zip(front["kvhub"]["mappers"], reversed(family), strict=True):
        entry["digest"] = other.digest
    hub.store.put_file(REPO, "README.md", f"---\n{yaml.safe_dump(front)}---\n".encode())
    assert fetch(f"{REPO}/{family[0].digest[:9]}").digest == family[0].digest
    for hostile in ({"mappers": 5}, {"mappers": [{"folder": "../x", "digest": "a" * 64}, 3, None]}, []):
        hub.store.put_file(REPO, "README.md", f"---\n{yaml.safe_dump({'kvhub': hostile})}---\n".encode())
        assert fetch(f"{REPO}/{family[1].digest[:9]}").digest == family[1].digest
        assert all(hit.repo_id == REPO for hit in search())


def test_a_flipped_byte_in_a_folder_is_refused(
    family: list[Manifest], hub: LoopbackHub, home: Settings
) -> None:
    entry = hub.store.repos[REPO].head.tree["a-1b-to-b-7b/model.safetensors"]
    data = bytearray(hub.store.blob(entry).read_bytes())
    data[-1] ^= 1
    hub.store.blob(entry).write_bytes(data)
    with pytest.raises(Corrupt):
        fetch(f"{REPO}/a-1b-to-b-7b")
    assert [item.name for item in home.mappers.iterdir() if item.name != ".lock"] == []


def test_a_push_touches_its_own_folder_and_the_list(
    family: list[Manifest], hub: LoopbackHub, tmp_path: Path
) -> None:
    before = dict(hub.store.repos[REPO].head.tree)
    newer = make_artifact(tmp_path / "newer", seed=9, source="org/A-1B", target="org/B-7B")
    pushed = push(tmp_path / "newer", REPO, allow_unevaluated=True)  # all are in folders, so is this
    assert pushed.place == f"{REPO}/a-1b-to-b-7b"
    after = hub.store.repos[REPO].head.tree
    assert "a-1b-to-b-7b/evidence.json" not in after
    for name, entry in before.items():
        if name.startswith("b-7b-to-a-1b/"):
            assert after[name] == entry
    front, text = root_card(hub)
    assert [m["digest"] for m in front["kvhub"]["mappers"]] == [newer.digest, family[1].digest]
    assert "not evaluated" in text
    again = push(tmp_path / "newer", REPO, allow_unevaluated=True)
    assert again.commit == pushed.commit


def test_models_that_are_called_alike_do_not_replace_each_other(
    family: list[Manifest], hub: LoopbackHub, tmp_path: Path
) -> None:
    other = publishable(tmp_path / "other", source="somebody/A-1B", target="org/B-7B")
    assert push(tmp_path / "other", REPO).subfolder == f"a-1b-to-b-7b-{other.digest[:8]}"
    assert fetch(f"{REPO}/a-1b-to-b-7b").digest == family[0].digest


def test_a_mapper_at_the_root_and_one_in_a_folder(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    root = publishable(tmp_path / "root", seed=1)
    push(tmp_path / "root", REPO, licence="mit")
    inner = publishable(tmp_path / "inner", seed=2, source="org/Other")
    push(tmp_path / "inner", f"{REPO}/sub", tag="v1")
    front, text = root_card(hub)
    assert (front["kvhub"]["digest"], front["license"]) == (root.digest, "mit")
    assert "More mappers in this repository" in text
    newer = publishable(tmp_path / "newer", seed=3)
    push(tmp_path / "newer", REPO, licence="mit")
    assert root_card(hub)[0]["kvhub"]["mappers"][0]["digest"] == inner.digest
    assert fetch(REPO).digest == newer.digest
    assert fetch(f"{REPO}/{newer.digest[:8]}").digest == newer.digest
    assert fetch(f"{REPO}/sub@v1").digest == find(f"{REPO}/sub@v1", home).digest == inner.digest
    assert [(hit.repo_id, hit.digest) for hit in search(source="other")] == [(f"{REPO}/sub", inner.digest)]
    assert {hit.repo_id for hit in search()} == {REPO, f"{REPO}/sub"}


def test_search_answers_for_the_pair_not_for_the_repository(family: list[Manifest], hub: LoopbackHub) -> None:
    with open_registry() as registry:
        known = {row.digest: row.state.value for row in registry.list()}
    (hit,) = search(source="A-1B", known=known)
    assert (hit.repo_id, hit.target, hit.scores["top1"]) == (f"{REPO}/a-1b-to-b-7b", "org/B-7B", 0.95)
    assert search(source="a-1b", target="a-1b") == []
    assert len([line for line in hub.log if line[1].startswith("/api/models")]) == 2


def test_a_lock_knows_the_folder(
    family: list[Manifest], hub: LoopbackHub, home: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = fetch(f"{REPO}/b-7b-to-a-1b")
    lock = make_lock([(row, family[1])])
    assert (lock.mappers[0].repo, lock.mappers[0].folder) == (REPO, "b-7b-to-a-1b")
    path = tmp_path / "kvhub.lock"
    write_lock(path, lock)
    monkeypatch.setenv("KVHUB_HOME", str(tmp_path / "elsewhere"))
    (again,) = pull_locked(path, Settings.load())
    assert again.digest == family[1].digest
    content = json.loads(path.read_bytes())
    content["mappers"][0]["folder"] = "../up"
    path.write_text(json.dumps(content))
    with pytest.raises(Corrupt, match="folder"):
        read_lock(path)


NONE = (
    *("org/name/", "org/name//x", "org/name/../x", "org/name/.git", "org/name/a/b/c/d/e", "org/name/assets"),
    *("org/name/ü", "org/name/x@", "org/name/x@a@b", "org//x", "/org/name/x"),
)


@pytest.mark.parametrize("text", [*NONE, "org/name/x y", "x" * 5000])
def test_references_that_are_none(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse(text)
    assert caught.value.hint and len(caught.value.message) < 400


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(), st.from_regex(r"[a.]{1,3}/[a.-]{1,4}(/[a.]{0,3}){0,3}(@[a./]{0,3})?", fullmatch=True)
    )
)
def test_any_text_is_refused_or_means_one_place(text: str) -> None:
    try:
        found = parse(text)
    except BadInput:
        assert not is_place(text)
        return
    again = found.place + (f"@{found.revision}" if found.revision else "")
    assert (parse(again), again) == (found, text)
    path = PurePosixPath(found.path("manifest.json"))
    assert not path.is_absolute() and not any(part.startswith(".") for part in path.parts)


def test_a_reference_says_everything_once() -> None:
    found = parse("org/name/a/b@v1.0")
    assert (found.repo_id, found.subfolder, found.revision) == ("org/name", "a/b", "v1.0")
    assert parse("org/name", revision="v1", subfolder="a") == Reference("org/name", "a", "v1")
    for again in ({"revision": "v2"}, {"subfolder": "c"}):
        with pytest.raises(KvhubError, match="another"):
            parse("org/name/a/b@v1.0", **again)  # type: ignore[arg-type]
    assert folder("") == ""
