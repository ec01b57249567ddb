"""The last step of a pull: what becomes of what is here already, and of what was interrupted."""

from __future__ import annotations

from typing import Any

import pytest
from loopback_hub import LoopbackHub
from support.published import flipped, make_evidence

from kvhub.artifact.evidence import read_evidence, write_evidence
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import verify_artifact
from kvhub.catalog import demote, find, open_registry, record_evidence
from kvhub.errors import Corrupt, NotFound
from kvhub.hub import pull as pulling
from kvhub.hub.pull import fetch, pull
from kvhub.settings import Settings
from kvhub.store.removal import remove
from kvhub_registry import State

REPO = "tester/mapper"


def test_a_damaged_copy_in_the_store_is_replaced(published: Manifest, home: Settings) -> None:
    path = pull(REPO)
    weights = path / "model.safetensors"
    weights.write_bytes(flipped(weights.read_bytes()))
    assert pull(REPO) == path
    assert verify_artifact(path, deep=True) == published


def test_newer_evidence_arrives_without_the_weights_and_older_does_not(
    published: Manifest, hub: LoopbackHub, home: Settings
) -> None:
    pull(REPO)
    for created, expected in (("2026-11-29T14:00:00Z", 0.5), ("2026-11-29T09:00:00Z", 0.5)):
        top1 = 0.5 if created > "2026-11-29T13" else 0.99
        evidence = make_evidence(published, top1=top1, created=created)
        hub.store.put_file(REPO, "evidence.json", evidence.to_bytes())
        row = fetch(REPO)
        assert (row.score("top1"), row.state) == (expected, State.DRAFT)


def test_evidence_that_was_made_here_is_never_replaced(
    published: Manifest, hub: LoopbackHub, home: Settings
) -> None:
    path = pull(REPO)
    own = make_evidence(published, top1=0.3, created="2026-11-29T13:30:00Z")
    write_evidence(path, own)
    record_evidence(published, own, why="gate", settings=home)
    theirs = make_evidence(published, top1=0.99, created="2026-11-29T14:00:00Z")
    hub.store.put_file(REPO, "evidence.json", theirs.to_bytes())
    for damaged in (False, True):
        if damaged:
            (path / "model.safetensors").write_bytes(b"")
            (path / "assets").mkdir()
            (path / "assets" / "diagnostics.json").write_bytes(b"{}")
        row = fetch(REPO)
        assert (row.state, row.score("top1")) == (State.DRAFT, 0.3)
        assert read_evidence(path, published) == own
        assert verify_artifact(path, deep=True) == published
    assert (path / "assets" / "diagnostics.json").exists()


def test_a_date_that_is_yet_to_come_is_not_newer(
    published: Manifest, hub: LoopbackHub, home: Settings
) -> None:
    pull(REPO)
    late = make_evidence(published, top1=0.99, created="2099-01-01T00:00:00Z")
    hub.store.put_file(REPO, "evidence.json", late.to_bytes())
    assert fetch(REPO).score("top1") == 0.95
    (home.mappers / published.digest / "evidence.json").unlink()
    assert fetch(REPO).score("top1") == 0.99  # there is no other
    right = make_evidence(published, top1=0.9)
    hub.store.put_file(REPO, "evidence.json", right.to_bytes())
    assert fetch(REPO).score("top1") == 0.9


def test_a_mapper_that_is_removed_during_its_pull(
    published: Manifest, home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was complete when the pull looked is gone when it would keep it: that is no damage."""
    pull(REPO)
    real = pulling.keep

    def removed(*arguments: Any) -> None:
        remove(find(published.digest, home), home)
        real(*arguments)

    with monkeypatch.context() as patch, pytest.raises(NotFound, match="was removed from the store"):
        patch.setattr(pulling, "keep", removed)
        pull(REPO)
    assert verify_artifact(pull(REPO), deep=True) == published


@pytest.mark.parametrize("step", ["record_location", "judge"])
def test_a_pull_that_was_interrupted_ends_as_one_that_was_not(
    published: Manifest, hub: LoopbackHub, home: Settings, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"kvhub.hub.keep.{step}", killed)
        pull(REPO)
    assert find(published.digest, home).state is State.DRAFT
    row = fetch(REPO)
    assert (row.state, row.score("top1"), len(row.locations)) == (State.READY, 0.95, 1)
    newer = make_evidence(published, top1=0.3, created="2026-11-29T14:00:00Z")
    hub.store.put_file(REPO, "evidence.json", newer.to_bytes())
    assert fetch(REPO).state is State.DRAFT  # it is still known that the evidence came by a pull


def test_a_lost_registry_is_rebuilt_by_pull(published: Manifest, hub: LoopbackHub, home: Settings) -> None:
    from kvhub.hub.locked import pull_locked
    from kvhub.hub.lockfile import make_lock, write_lock

    before = fetch(REPO)
    lock = home.home / "kvhub.lock"
    write_lock(lock, make_lock([(before, published)]))
    for again in (lambda: fetch(REPO), lambda: pull_locked(lock, home)[0]):
        with open_registry(home) as registry:
            registry.remove(published.digest)
        row = again()
        assert (row.state, set(row.scores)) == (State.READY, set(before.scores))
        assert (row.locations, row.aliases) == (before.locations, before.aliases)


def test_what_verify_demoted_is_ready_when_it_is_right_again(
    published: Manifest, hub: LoopbackHub, home: Settings
) -> None:
    path = pull(REPO)
    (path / "signature.json").write_bytes(b"{")
    demote(published.digest, "kvhub verify: signature.json: not valid JSON", home)
    assert fetch(REPO).state is State.READY
    assert not (path / "signature.json").exists()


@pytest.mark.parametrize("damage", [b"", b"{", b'{"schema_version":1}'])
def test_damaged_evidence_is_fetched_again(
    published: Manifest, hub: LoopbackHub, home: Settings, damage: bytes
) -> None:
    from kvhub.hub.locked import pull_locked
    from kvhub.hub.lockfile import make_lock, write_lock

    path = pull(REPO)
    lock = home.home / "kvhub.lock"
    write_lock(lock, make_lock([(find(REPO, home), published)]))
    for again in (lambda: fetch(REPO), lambda: pull_locked(lock, home)[0]):
        (path / "evidence.json").write_bytes(damage)
        demote(published.digest, "kvhub verify: evidence.json", home)
        assert again().state is State.READY
        assert read_evidence(path, published) == make_evidence(published)
    hub.store.drop_file(REPO, "evidence.json")
    (path / "evidence.json").write_bytes(damage)
    with pytest.raises(Corrupt, match="is damaged, and tester/mapper has none") as caught:
        pull(REPO)
    assert "kvhub eval" in caught.value.hint
    assert find(published.digest, home).state is State.DRAFT
