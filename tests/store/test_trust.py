"""Signatures: made, checked, demanded; by the maintained library, with real keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.published import make_artifact
from support.stored import stored

from kvhub.artifact.read import verify_artifact
from kvhub.errors import BadInput, Corrupt, Incompatible, KvhubError
from kvhub.mapper.load import load_mapper
from kvhub.settings import Settings
from kvhub.store import signature, trust
from kvhub.store.lifecycle import promote
from kvhub.store.trust import Policy

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
        with pytest.raises(Corrupt):
            trust.load(home)
    trust.path(home).write_text('{"namespaces": ["our-org"]}')
    trust.demand_namespace("our-org/mapper", home)
    with pytest.raises(Incompatible) as caught:
        trust.demand_namespace("their-org/mapper", home)
    assert caught.value.code == "publisher"
