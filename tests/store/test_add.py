"""A mapper made here enters the store whole, with its row, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.published import make_artifact
from support.small_disk import filled, small_disk

from kvhub.artifact.read import open_tensors
from kvhub.catalog import find
from kvhub.errors import KvhubError
from kvhub.settings import Settings
from kvhub.store.add import add


def test_a_full_disk_under_the_registry_leaves_no_files(tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path / "made")
    tensors = open_tensors(tmp_path / "made", manifest)
    with small_disk(tmp_path / "disk", "2m") as disk:
        settings = Settings(disk, f"sqlite:///{disk / 'registry.db'}", False)
        with filled(disk, leave=80 << 10), pytest.raises(KvhubError, match=r"registry at .* is full"):
            add(manifest, tensors, settings, tag="try")
        assert [path.name for path in settings.mappers.iterdir()] == [".lock"]
        assert not list((disk / "blobs").glob("*"))
        place, written = add(manifest, tensors, settings, tag="try")
        assert Path(find(written.digest, settings).path) == place and written.digest == manifest.digest
