"""Where a mapper is found: a directory, the registry, or a repository pulled before."""

from __future__ import annotations

import shutil

import pytest
from support.mappers import make_identity, make_manifest, random_tensors

from kvhub.artifact.write import write_artifact
from kvhub.catalog import record_location, register
from kvhub.errors import BadInput, Corrupt, KvhubError, NotFound, Unreachable
from kvhub.mapper.load import load_mapper, locate
from kvhub_registry import HubLocation


def write(path, **changes):
    manifest = make_manifest(make_identity("org/a"), make_identity("org/b", head_dim=8), k=2, **changes)
    return write_artifact(path, manifest, random_tensors(manifest))


def test_by_digest_and_its_beginning(tmp_path):
    manifest = write(tmp_path / "m")
    register(tmp_path / "m", manifest)
    for ref in (manifest.digest, manifest.digest[:10]):
        assert locate(ref) == tmp_path / "m"
        assert load_mapper(ref).manifest == manifest
    with pytest.raises(NotFound):
        load_mapper("f" * 64)


def test_another_mapper_in_the_registered_place(tmp_path):
    manifest = write(tmp_path / "m")
    register(tmp_path / "m", manifest)
    shutil.rmtree(tmp_path / "m")
    other = write(tmp_path / "m", objective="other")
    assert load_mapper(tmp_path / "m").manifest == other
    with pytest.raises(Corrupt, match="not the registered"):
        load_mapper(manifest.digest)
    shutil.rmtree(tmp_path / "m")
    with pytest.raises(NotFound):
        load_mapper(manifest.digest)


def test_a_pulled_repository_without_the_hub(tmp_path, monkeypatch):
    """Nobody listens on the endpoint: only what was asked for by name alone is found at home."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    manifest = write(tmp_path / "m")
    register(tmp_path / "m", manifest)
    record_location(manifest.digest, HubLocation(repo_id="org/mapper", commit="a" * 40, pushed=False))
    assert load_mapper("org/mapper").manifest == manifest
    for ref in ("org/mapper@v2", "org/unknown"):
        with pytest.raises(Unreachable):
            load_mapper(ref)


@pytest.mark.parametrize("ref", ["", "no such mapper", "../x/y", "a/b/c/d/e/f/g", "org/na me"])
def test_references_that_mean_nothing(ref, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KvhubError) as caught:
        load_mapper(ref or "''")
    assert isinstance(caught.value, NotFound | BadInput)
