"""Signatures: made, checked, demanded; by the maintained library, with real keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.published import make_artifact
from support.stored import stored

from kvhub.artifact.read import verify_artifact
from kvhub.catalog import find
from kvhub.errors import BadInput, Corrupt, Incompatible, KvhubError
from kvhub.mapper.load import load_mapper
from kvhub.settings import Settings
from kvhub.store import signature, trust
from kvhub.store.health import examine
from kvhub.store.lifecycle import promote
from kvhub.store.trust import Policy
from kvhub.store.verify import verify
from kvhub_registry import State

pytest.importorskip("cryptography")


def signed(home: Settings, tmp_path: Path):  # type: ignore[no-untyped-def]
    manifest = stored(home)
    key = signature.new_key(tmp_path / "key.pem")
    signature.sign(home.mappers / manifest.digest, manifest, tmp_path / "key.pem")
    return manifest, home.mappers / manifest.digest, key


def test_what_a_signature_says(home: Settings, tmp_path: Path) -> None:
    manifest, path, key = signed(home, tmp_path)
    assert (tmp_path / "key.pem").stat().st_mode & 0o777 == 0o600
    verify_artifact(path, deep=True)
    assert trust.demand(path, manifest, home).status == "unknown"
    trust.save(Policy(publishers={"our team": key}), home)
    assert str(trust.demand(path, manifest, home)) == f"signed by our team ({key[:12]})"
    (path / "signature.json").unlink()
    assert trust.demand(path, manifest, home).status == "unsigned"


def test_a_policy_that_requires_signatures(
    home: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, path, key = signed(home, tmp_path)
    monkeypatch.setenv("KVHUB_REQUIRE_SIGNATURE", "1")
    for use in (lambda: load_mapper(path), lambda: promote(manifest.digest, why="please")):
        with pytest.raises(Incompatible) as caught:
            use()
        assert caught.value.code == "signature"
    trust.save(Policy(publishers={"our team": key}), home)
    assert load_mapper(path).manifest == manifest
    promote(manifest.digest, why="signed")
    trust.save(Policy(publishers={"others": "0" * 64}), home)
    with pytest.raises(Incompatible):
        load_mapper(path)


def test_wrong_signatures_are_refused_without_any_policy(home: Settings, tmp_path: Path) -> None:
    manifest, path, _ = signed(home, tmp_path)
    good = json.loads((path / "signature.json").read_text())
    other = signature.new_key(tmp_path / "other.pem")
    for change in (
        {"signature": "0" * 128},
        {"public_key": other},
        {"public_key": "f" * 64},
        {"mapper": "0" * 64},
        {"algorithm": "none"},
        {"signature": ""},
        {"extra": 1},
    ):
        (path / "signature.json").write_text(json.dumps(good | change))
        with pytest.raises(Corrupt):
            trust.demand(path, manifest, home)
    for garbage in (b"", b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff" * 100, b"0" * 70_000):
        (path / "signature.json").write_bytes(garbage)
        with pytest.raises(Corrupt):
            trust.demand(path, manifest, home)


def test_a_signature_of_another_mapper(home: Settings, tmp_path: Path) -> None:
    _, path, _ = signed(home, tmp_path)
    other = make_artifact(tmp_path / "other", seed=3)
    (tmp_path / "other" / "signature.json").write_bytes((path / "signature.json").read_bytes())
    with pytest.raises(Corrupt, match="another mapper"):
        trust.demand(tmp_path / "other", other, home)


def test_keys_that_are_none(home: Settings, tmp_path: Path) -> None:
    manifest = stored(home)
    (tmp_path / "text").write_text("no key")
    with pytest.raises(BadInput):
        signature.sign(home.mappers / manifest.digest, manifest, tmp_path / "text")
    with pytest.raises(KvhubError):
        signature.sign(home.mappers / manifest.digest, manifest, tmp_path / "absent")
    with pytest.raises(BadInput):
        signature.new_key(tmp_path / "text")
    with pytest.raises(BadInput, match="not a directory"):
        signature.new_key(tmp_path / "no" / "key")


def test_a_policy_file_is_read_strictly(home: Settings) -> None:
    home.home.mkdir()
    for text in ('{"requiresignature": true}', "[]", '{"publishers": {"a": "xyz"}}', "{"):
        trust.path(home).write_text(text)
        with pytest.raises(BadInput, match=r"trust\.json") as caught:
            trust.load(home)
        assert "kvhub trust" in caught.value.hint
    trust.path(home).write_text('{"namespaces": ["our-org"]}')
    trust.demand_namespace("our-org/mapper", home)
    with pytest.raises(Incompatible) as refused:
        trust.demand_namespace("their-org/mapper", home)
    assert refused.value.code == "publisher"


def test_a_policy_that_cannot_be_read_changes_no_mapper(home: Settings) -> None:
    """Not even one whose files are damaged: what is wrong with them is said once the policy can be read."""
    manifest = stored(home)
    trust.path(home).write_text('{"requiresignature": true}')
    weights = home.mappers / manifest.digest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    uses = (
        lambda: promote(manifest.digest, why="please"),
        lambda: verify(weights.parent, find(manifest.digest, home), deep=True, settings=home),
    )
    for use in uses:
        with pytest.raises(BadInput, match="requiresignature"):
            use()
        assert find(manifest.digest, home).state is State.READY


def test_a_file_that_was_named_and_is_not_there(
    home: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trust.load(home) == Policy()  # the place in KVHUB_HOME: no policy
    home.home.mkdir(exist_ok=True)
    trust.path(home).symlink_to(tmp_path / "gone.json")
    with pytest.raises(BadInput, match="does not exist"):
        trust.load(home)
    named = tmp_path / "team.json"
    monkeypatch.setenv("KVHUB_TRUST", str(named))
    with pytest.raises(BadInput, match=r"team\.json does not exist"):
        trust.load(home)
    assert [item.result for item in examine(home, ask_hub=False) if item.name == "trust"] == ["FAILS"]
    trust.save(trust.load(home, absent=True), home)
    assert trust.load(home) == Policy()


@pytest.mark.parametrize(
    ("said", "required"), [("1", True), ("true", True), ("on", True), ("0", False), ("", False)]
)
def test_signatures_demanded_by_the_environment(
    home: Settings, monkeypatch: pytest.MonkeyPatch, said: str, required: bool
) -> None:
    monkeypatch.setenv("KVHUB_REQUIRE_SIGNATURE", said)
    assert trust.load(home).require_signature is required


def test_a_word_that_is_neither_yes_nor_no(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHUB_REQUIRE_SIGNATURE", "always")
    with pytest.raises(BadInput, match="always"):
        trust.load(home)
