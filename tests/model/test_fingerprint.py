"""Which weights: by bytes, not by name, and remembered without being fooled."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file
from support.tiny import make_tiny

from kvhub.errors import Corrupt, Incompatible, NotFound
from kvhub.model import fingerprint
from kvhub.model.fingerprint import hub_snapshot, weight_files, weights_revision
from kvhub.model.identify import describe

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_commit_of_a_hub_snapshot(tmp_path):
    path = tmp_path / "models--org--name" / "snapshots" / COMMIT
    path.mkdir(parents=True)
    assert weights_revision(path) == f"commit:{COMMIT}"
    assert hub_snapshot(path) == ("org/name", COMMIT)


def test_a_directory_that_only_looks_like_a_snapshot_is_fingerprinted(tmp_path):
    path = make_tiny(tmp_path / "snapshots" / COMMIT)
    assert weights_revision(path).startswith("fingerprint:")


def test_stable_under_copy_rename_and_memory(tmp_path):
    path = make_tiny(tmp_path / "a")
    first = weights_revision(path)
    assert weights_revision(path) == first  # from memory
    assert weights_revision(shutil.copytree(path, tmp_path / "b")) == first
    path.rename(tmp_path / "c")
    assert weights_revision(tmp_path / "c") == first
    (tmp_path / "c" / "model.safetensors").rename(tmp_path / "c" / "weights.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "weights.safetensors"}}
    (tmp_path / "c" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert weights_revision(tmp_path / "c") == first


def test_what_is_loaded(tmp_path):
    """What transformers and SGLang load, and not what lies beside it."""
    path = make_tiny(tmp_path / "a")
    first, index = weights_revision(path), path / "model.safetensors.index.json"
    save_file(
        {"layers.0.attention.wq.weight": torch.ones(4)}, path / "consolidated.safetensors"
    )  # as Mistral
    assert [file.name for file in weight_files(path)] == ["model.safetensors"]
    assert weights_revision(path) == first
    describe(path)
    for content in ("{}", '{"weight_map": {}}', '{"metadata": [], "weight_map": {"a": "model.safetensors"}}'):
        index.write_text(content)
        with pytest.raises(Corrupt, match="no index of weights"):
            weight_files(path)
    index.write_text('{"metadata": {}, "weight_map": {"a": "consolidated.safetensors"}}')
    with pytest.raises(Incompatible, match="an index of other files"):
        weight_files(path)
    index.unlink()
    (path / "model.safetensors").unlink()
    with pytest.raises(NotFound, match=r"has consolidated\.safetensors, but no model\.safetensors"):
        weight_files(path)


def test_one_byte_in_a_small_file(tmp_path):
    path = make_tiny(tmp_path / "a")
    file = path / "model.safetensors"
    first = weights_revision(path)
    for offset in (file.stat().st_size - 1, file.stat().st_size // 2):
        flip(file, offset)
        second = weights_revision(path)
        assert second != first
        first = second


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A file above the whole-file bound (lowered), with one block in the middle that no sample covers."""
    monkeypatch.setattr(fingerprint, "WHOLE", 1 << 10)
    monkeypatch.setattr(fingerprint, "BLOCK", 256)
    monkeypatch.setattr(fingerprint, "BLOCKS", 5)
    monkeypatch.setattr(fingerprint, "TENSOR_SAMPLE", 64)
    path = tmp_path / "m"
    path.mkdir()
    save_file({"a": torch.zeros(5000), "b": torch.zeros(5000)}, path / "model.safetensors")
    return path


def test_samples_cover_every_tensor_the_ends_and_the_header(large):
    file = large / "model.safetensors"
    size = file.stat().st_size
    header = fingerprint.read_header(file)
    seen = {weights_revision(large)}
    for offset in (10, header["a"].start, header["b"].start + 63, size // 2, size - 1):
        flip(file, offset)
        seen.add(weights_revision(large))
    assert len(seen) == 6


def test_samples_read_a_small_part_of_a_large_file(large):
    file = large / "model.safetensors"
    size = file.stat().st_size
    parts = list(fingerprint._samples(fingerprint.read_header(file), size))
    assert all(0 <= start <= end <= size for start, end in parts)
    assert sum(end - start for start, end in parts) < size / 20


def test_size_and_shape_take_part(tmp_path):
    seen = set()
    for index, tensor in enumerate([torch.zeros(64, 64), torch.zeros(32, 128), torch.zeros(64, 65)]):
        path = tmp_path / str(index)
        path.mkdir()
        save_file({"a": tensor}, path / "model.safetensors")
        seen.add(weights_revision(path))
    assert len(seen) == 3


def test_memory_is_used_and_never_trusted_when_damaged(tmp_path, kvhub_home):
    path = make_tiny(tmp_path / "a")
    first = weights_revision(path)
    (memory,) = (kvhub_home / "cache" / "fingerprints").iterdir()
    text = memory.read_text()
    digest = first.removeprefix("fingerprint:")
    # Used: a plausible other digest in the memory is what comes back.
    memory.write_text(text.replace(digest, "f" * 64))
    assert weights_revision(path) == "fingerprint:" + "f" * 64
    damages = (b"", b"[]", b"\xff", text[: len(text) // 2].encode(), text.replace(digest, "short").encode())
    for damage in (*damages, b'{"key": ' + b"[" * 50_000, b"x" * (2 << 20)):
        memory.write_bytes(damage)
        assert weights_revision(path) == first
    memory.unlink()
    memory.mkdir()
    assert weights_revision(path) == first


def test_same_size_and_times_but_another_file_is_seen(tmp_path):
    path = make_tiny(tmp_path / "a")
    file = path / "model.safetensors"
    first, found = weights_revision(path), file.stat()
    shutil.copy(file, tmp_path / "other")
    flip(tmp_path / "other", found.st_size - 1)
    (tmp_path / "other").replace(file)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert weights_revision(path) != first


def test_a_home_that_cannot_be_written_is_no_error(tmp_path, kvhub_home):
    path = make_tiny(tmp_path / "a")
    kvhub_home.mkdir(parents=True, exist_ok=True)
    (kvhub_home / "cache").write_text("a file where the directory should be")
    assert weights_revision(path).startswith("fingerprint:")


def test_shards(tmp_path):
    path = make_tiny(tmp_path / "a", shard="40KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    assert weights_revision(path).startswith("fingerprint:")
    sorted(path.glob("*.safetensors"))[0].unlink()
    with pytest.raises(NotFound, match="missing"):
        weights_revision(path)


def test_no_weights(tmp_path):
    with pytest.raises(NotFound, match="not a directory"):
        weights_revision(tmp_path / "absent")
    with pytest.raises(NotFound, match="no safetensors"):
        weights_revision(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(Corrupt):
        weights_revision(tmp_path)
