"""Artifacts and the registry together."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.published import make_artifact, make_evidence

from kvhub.catalog import (
    as_kvhub_error,
    demote,
    directory_of,
    find,
    open_registry,
    record_evidence,
    register,
    to_record,
)
from kvhub.errors import AccessDenied, BadInput, Corrupt, Incompatible, KvhubError, NotFound, Unreachable
from kvhub.settings import Settings
from kvhub.store.removal import remove
from kvhub_registry import (
    Ambiguous,
    BadAddress,
    Damaged,
    Denied,
    Full,
    NotRegistered,
    RegistryError,
    State,
    TooNew,
    Unavailable,
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "home", f"sqlite:///{tmp_path}/home/registry.db", False)


def test_every_registry_error_has_its_meaning() -> None:
    expected = {
        BadAddress: BadInput,
        NotRegistered: NotFound,
        Denied: AccessDenied,
        Unavailable: Unreachable,
        Damaged: Corrupt,
        TooNew: Incompatible,
        Full: KvhubError,
    }
    for kind, meaning in expected.items():
        error = as_kvhub_error(kind("m", "h"))
        assert (type(error), error.message, error.hint) == (meaning, "m", "h")
    assert type(as_kvhub_error(Ambiguous("m", "h", ()))) is BadInput
    assert type(as_kvhub_error(RegistryError("m"))) is KvhubError
    assert {*expected, Ambiguous} == set(RegistryError.__subclasses__())


def test_a_new_mapper_is_a_draft_that_shows_the_fits_own_r2(settings: Settings, tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path / "a")
    register(tmp_path / "a", manifest, settings)
    row = find(manifest.digest, settings)
    assert (row.state, row.score("r2_key", domain="fit"), row.score("r2_key")) == (State.DRAFT, 0.5, None)
    assert row.path == str(tmp_path / "a")
    assert row.source.digest == manifest.source.digest


def test_evidence_decides_the_state_each_time(settings: Settings, tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path / "a")
    register(tmp_path / "a", manifest, settings)
    for top1, state in ((0.95, State.READY), (0.5, State.DRAFT), (0.9, State.READY)):
        record_evidence(manifest, make_evidence(manifest, top1=top1), why="judged", settings=settings)
        row = find(manifest.digest, settings)
        assert (row.state, row.state_reason, row.score("top1")) == (state, "judged", top1)
        assert row.score("r2_key", domain="fit") == 0.5


def test_evidence_of_another_mapper_or_of_none_is_refused(settings: Settings, tmp_path: Path) -> None:
    one, other = make_artifact(tmp_path / "a", seed=1), make_artifact(tmp_path / "b", seed=2)
    register(tmp_path / "a", one, settings)
    with pytest.raises(Corrupt):
        record_evidence(one, make_evidence(other), why="no", settings=settings)
    with pytest.raises(NotFound):
        record_evidence(other, make_evidence(other), why="no", settings=settings)
    assert find(one.digest, settings).state is State.DRAFT


def test_a_date_that_is_none(tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path / "a")
    with pytest.raises(Corrupt):
        to_record(tmp_path, manifest.model_copy(update={"created": "yesterday"}))
    naive = to_record(tmp_path, manifest.model_copy(update={"created": "2026-11-29T12:00:00"}))
    assert naive.created.isoformat() == "2026-11-29T12:00:00+00:00"


def test_directories(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_artifact(tmp_path / "a")
    register(tmp_path / "a", manifest, settings)
    monkeypatch.chdir(tmp_path)
    for ref in (str(tmp_path / "a"), "./a", manifest.digest, manifest.digest[:7], "small-1b->large-7b"):
        assert directory_of(ref, settings) == tmp_path / "a", ref
    with pytest.raises(NotFound):
        directory_of("a", settings)  # a name is not a path, whatever lies in this directory


def test_a_copied_home_works_on_its_own_files(settings: Settings, tmp_path: Path) -> None:
    settings.mappers.mkdir(parents=True)
    manifest = make_artifact(tmp_path / "made")
    place = settings.mappers / manifest.digest
    (tmp_path / "made").rename(place)
    register(place, manifest, settings)
    copy = Settings(tmp_path / "copy", f"sqlite:///{tmp_path}/copy/registry.db", False)
    shutil.copytree(settings.home, copy.home)
    assert directory_of(manifest.digest, settings) == place
    assert directory_of(manifest.digest, copy) == copy.mappers / manifest.digest
    remove(find(manifest.digest, copy), copy)
    assert place.is_dir() and not (copy.mappers / manifest.digest).exists()


def test_remove_takes_files_of_the_store_only(settings: Settings, tmp_path: Path) -> None:
    inside = make_artifact(settings.mappers / "inside", seed=1)
    register(settings.mappers / "inside", inside, settings)
    outside = make_artifact(tmp_path / "outside", seed=2)
    register(tmp_path / "outside", outside, settings)
    linked = make_artifact(tmp_path / "linked", seed=3)
    (settings.mappers / "link").symlink_to(tmp_path / "linked")
    register(settings.mappers / "link", linked, settings)

    assert remove(find(inside.digest, settings), settings) is True
    assert remove(find(outside.digest, settings), settings) is False
    assert remove(find(linked.digest, settings), settings) is False
    assert (tmp_path / "outside" / "manifest.json").exists()
    assert (tmp_path / "linked" / "manifest.json").exists()
    assert {item.name for item in settings.mappers.iterdir()} == {"link", ".lock"}
    with open_registry(settings) as registry:
        assert registry.list() == []


def test_demote(settings: Settings, tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path / "a")
    assert demote(manifest.digest, "damaged", settings) is False
    register(tmp_path / "a", manifest, settings)
    record_evidence(manifest, make_evidence(manifest), why="passed", settings=settings)
    assert demote(manifest.digest, "damaged", settings) is True
    assert find(manifest.digest, settings).state_reason == "damaged"
