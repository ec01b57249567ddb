"""What a removal that was killed has left aside: gc puts it back, or the row says that it is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.stored import stored

from kvhub.catalog import demand_files, files_of, find, open_registry, to_record
from kvhub.errors import NotFound
from kvhub.settings import Settings
from kvhub.store.blobs import share
from kvhub.store.collect import collect
from kvhub.store.lifecycle import retire
from kvhub.store.removal import remove, undo
from kvhub_registry import State


def test_what_a_removal_left_is_no_matter_of_a_row_with_files_elsewhere(
    home: Settings, tmp_path: Path
) -> None:
    manifest = stored(home, 1)
    directory = home.mappers / manifest.digest
    shutil.copytree(directory, tmp_path / "copy")
    aside = directory.rename(directory.with_name(f".removed-{directory.name}"))
    next(aside.glob("*.safetensors")).unlink()
    with open_registry(home) as registry:
        registry.register(to_record(tmp_path / "copy", manifest))
    assert files_of(find(manifest.digest, home), home) == tmp_path / "copy"
    collect(home)
    assert not aside.exists() and find(manifest.digest, home).state is State.READY
    # another machine's: what is left here says nothing of its files
    shutil.rmtree(tmp_path / "copy")
    aside.mkdir()
    undo([find(manifest.digest, home)], home, shared=True)
    assert find(manifest.digest, home).state is State.READY


def test_rm_after_a_removal_that_was_killed_frees_all(home: Settings) -> None:
    manifest = stored(home, 1)
    directory = home.mappers / manifest.digest
    share(directory, manifest.files, home)
    assert list((home.home / "blobs").iterdir())
    directory.rename(directory.with_name(f".removed-{directory.name}"))
    remove(find(manifest.digest, home), home)
    assert not list((home.home / "blobs").iterdir())
    assert [path.name for path in home.mappers.iterdir()] == [".lock"]


def test_a_removal_by_gc_that_was_killed_goes_in_the_end(home: Settings) -> None:
    manifest = stored(home, 1)
    retire(manifest.digest, why="old", settings=home)
    wanted = collect(home, dry_run=True)
    directory = home.mappers / manifest.digest
    directory.rename(directory.with_name(f".removed-{directory.name}"))
    looked, done = collect(home, dry_run=True), collect(home)
    for found in (looked, done):
        assert (found.size, len(found.garbage), found.kept) == (wanted.size, 1, [])
    assert [path.name for path in home.mappers.iterdir()] == [".lock"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_removal_that_was_killed_before_the_row_went(home: Settings, whole: bool) -> None:
    """The files stand aside, the row is ready still: they come back, or the row says that they are gone."""
    manifest = stored(home, 1)
    directory = home.mappers / manifest.digest
    before = {path.name for path in directory.iterdir()}
    aside = directory.rename(directory.with_name(f".removed-{directory.name}"))
    if not whole:
        next(aside.glob("*.safetensors")).unlink()
    looked = collect(home, dry_run=True)
    assert aside.exists() and (aside not in [item.path for item in looked.garbage]) is whole
    with pytest.raises(NotFound) as gone:
        demand_files(find(manifest.digest, home), home)
    assert "kvhub gc puts them back" in gone.value.hint
    done = collect(home)
    assert not aside.exists() and [kept.by for kept in done.kept] == [kept.by for kept in looked.kept]
    assert [kept.digest for kept in done.kept] == [manifest.digest] * whole
    row = find(manifest.digest, home)
    if whole:
        assert row.state is State.READY and {path.name for path in directory.iterdir()} == before
    else:
        assert row.state is State.DRAFT and "its files are gone" in row.state_reason
