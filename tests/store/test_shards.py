"""Bytes that several mappers share: one file, and counted once."""

from __future__ import annotations

import stat

import pytest
from support.stored import stored

from kvhub.artifact.read import verify_artifact
from kvhub.settings import Settings
from kvhub.store.collect import collect
from kvhub.store.lifecycle import retire


def test_bytes_that_a_mapper_still_has_are_not_free(home: Settings) -> None:
    from support.mappers import make_identity, make_manifest, random_tensors

    from kvhub.artifact.write import write_artifact
    from kvhub.catalog import register

    made = []
    for day in ("01", "02", "03"):
        manifest = make_manifest(
            make_identity("a/a"), make_identity("b/b"), created=f"2026-01-{day}T00:00:00Z"
        )
        manifest = write_artifact(home.mappers / "new", manifest, random_tensors(manifest))
        register((home.mappers / "new").rename(home.mappers / manifest.digest), manifest, home)
        made.append(manifest)
    for manifest in made[:2]:
        retire(manifest.digest, why="old")
    before = bytes_on_disk(home)
    would, done = collect(home, dry_run=True), collect(home)
    assert would.size == done.size == before - bytes_on_disk(home)


def test_a_blob_that_a_mapper_has_lost_stays(home: Settings) -> None:
    manifest = stored(home)
    (home.mappers / manifest.digest / "model.safetensors").unlink()
    assert collect(home, grace=0).garbage == []
    assert len(list((home.home / "blobs").iterdir())) == 1


def test_equal_shards_are_one_file(home: Settings) -> None:
    from support.mappers import make_identity, make_manifest, random_tensors

    from kvhub.artifact.write import write_artifact
    from kvhub.catalog import register

    made = []
    for day in ("01", "02"):
        manifest = make_manifest(
            make_identity("a/a"), make_identity("b/b"), created=f"2026-01-{day}T00:00:00Z"
        )
        manifest = write_artifact(home.mappers / day, manifest, random_tensors(manifest))
        register(home.mappers / day, manifest, home)
        made.append(manifest)
    one, two = (home.mappers / day / "model.safetensors" for day in ("01", "02"))
    assert one.samefile(two)
    assert made[0].digest != made[1].digest
    verify_artifact(home.mappers / "01", deep=True)


def bytes_on_disk(home: Settings) -> int:
    """Of mappers and blobs, a file with several names once."""
    found = [p.lstat() for folder in (home.mappers, home.home / "blobs") for p in folder.rglob("*")]
    return sum({(f.st_dev, f.st_ino): f.st_size for f in found if not stat.S_ISDIR(f.st_mode)}.values())


@pytest.mark.parametrize("shared", [True, False])
def test_gc_counts_bytes_once_and_says_before_what_it_does(home: Settings, shared: bool) -> None:
    from support.mappers import make_identity, make_manifest, random_tensors

    from kvhub.artifact.write import write_artifact
    from kvhub.catalog import register

    made = []
    for day in ("01", "02", "03"):
        manifest = make_manifest(
            make_identity("a/a"), make_identity("b/b"), created=f"2026-01-{day}T00:00:00Z"
        )
        tensors = random_tensors(manifest, 0 if shared else int(day))
        manifest = write_artifact(home.mappers / "new", manifest, tensors)
        register((home.mappers / "new").rename(home.mappers / manifest.digest), manifest, home)
        made.append(manifest)
    assert len(list((home.home / "blobs").iterdir())) == (1 if shared else 3)
    for several in (made[:1], made[1:]):
        for manifest in several:
            retire(manifest.digest, why="old")
        would = collect(home, dry_run=True)
        before = bytes_on_disk(home)
        done = collect(home)
        assert would.size == done.size == before - bytes_on_disk(home)
        assert [(i.kind, i.size) for i in would.garbage] == [(i.kind, i.size) for i in done.garbage]
    assert done.size > made[1].size
    assert bytes_on_disk(home) == 0


def test_a_damaged_blob_is_not_spread(home: Settings) -> None:
    from kvhub.catalog import register

    manifest = stored(home, 1)
    path = home.mappers / manifest.digest
    blob = next((home.home / "blobs").iterdir())
    data = bytearray(blob.read_bytes())
    blob.unlink()
    data[-1] ^= 1
    blob.write_bytes(data)
    register(path, manifest, home)
    verify_artifact(path, deep=True)
    assert blob.samefile(path / "model.safetensors")
