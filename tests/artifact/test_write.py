"""Writing: whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.mappers import make_identity, make_manifest, random_tensors
from support.small_disk import small_disk

from kvhub.artifact import write as module
from kvhub.artifact.read import open_tensors, read_manifest, verify_artifact
from kvhub.artifact.write import write_artifact
from kvhub.errors import AccessDenied, BadInput, KvhubError


def names(path):
    return sorted(item.name for item in path.iterdir())


def pair(**changes):
    source = make_identity("org/source", num_layers=3, head_dim=8)
    target = make_identity("org/target", num_layers=4, num_kv_heads=4, head_dim=4)
    return make_manifest(source, target, k=2, **changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(tmp_path, dtype):
    manifest = pair(weights_dtype=dtype)
    tensors = random_tensors(manifest)
    written = write_artifact(tmp_path / "m", manifest, tensors)
    assert read_manifest(tmp_path / "m") == written == verify_artifact(tmp_path / "m", deep=True)
    assert hashlib.sha256((tmp_path / "m" / "manifest.json").read_bytes()).hexdigest() == written.digest
    back = open_tensors(tmp_path / "m", written)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        stored = getattr(torch, dtype) if name.endswith(".weight") else torch.float32
        assert back[name].dtype == stored and torch.equal(back[name], tensor.to(stored))
    assert names(tmp_path) == ["m"]
    assert names(tmp_path / "m") == ["config.json", "manifest.json", "model.safetensors"]


def test_same_content_same_digest(tmp_path):
    manifest, tensors = pair(), random_tensors(pair())
    one = write_artifact(tmp_path / "a", manifest, tensors)
    two = write_artifact(tmp_path / "b", manifest, {name: tensors[name] for name in reversed(tensors)})
    assert one.digest == two.digest
    tensors["layers.0.k.bias"] = tensors["layers.0.k.bias"] + 1
    assert write_artifact(tmp_path / "c", manifest, tensors).digest != one.digest


def test_shards_by_target_layer(tmp_path, monkeypatch):
    manifest = pair()
    monkeypatch.setattr(module, "SHARD_BYTES", 10_000)  # one layer is 2 * 4 * (32 * 16 + 16) = 4,224 bytes
    written = write_artifact(tmp_path / "m", manifest, random_tensors(manifest))
    assert [entry.name for entry in written.files] == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert verify_artifact(tmp_path / "m", deep=True) == written
    back = open_tensors(tmp_path / "m", written)
    assert all(torch.equal(back[name], tensor) for name, tensor in random_tensors(manifest).items())
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["layers.1.v.bias"] == "model-00001-of-00002.safetensors"
    assert index["weight_map"]["layers.2.k.weight"] == "model-00002-of-00002.safetensors"
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in back.values())


def spoil(tensors, how):
    name = "layers.1.v.weight"
    if how == "missing":
        del tensors[name]
    elif how == "extra":
        tensors["layers.9.k.bias"] = torch.zeros(2, 4)
    elif how == "shape":
        tensors[name] = tensors[name].T.contiguous()
    elif how == "nan":
        tensors[name][0, 0] = float("nan")
    else:
        tensors[name][0, 0] = 3.4e38  # finite in float32, infinite in bfloat16


@pytest.mark.parametrize("how", ["missing", "extra", "shape", "nan", "overflow"])
def test_tensors_that_are_not_the_mappers(tmp_path, how):
    manifest = pair(weights_dtype="bfloat16")
    tensors = random_tensors(manifest)
    spoil(tensors, how)
    with pytest.raises(BadInput) as caught:
        write_artifact(tmp_path / "m", manifest, tensors)
    assert "\n" not in caught.value.message
    assert not any(tmp_path.iterdir())


def test_a_directory_in_use_is_left_alone(tmp_path):
    manifest = pair()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.tex").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").write_text("x")
    for name in ("m", "link", "file"):
        with pytest.raises(BadInput, match="exists already"):
            write_artifact(tmp_path / name, manifest, random_tensors(manifest))
    assert names(tmp_path) == ["file", "link", "m"]
    (tmp_path / "empty").mkdir()
    write_artifact(tmp_path / "empty", manifest, random_tensors(manifest))


LIMITED = """
import errno, resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from support.mappers import make_identity, make_manifest, random_tensors
from support.small_disk import small_disk
from kvhub.artifact.write import write_artifact
from kvhub.errors import KvhubError
big = make_identity(num_layers=2, num_kv_heads=8, head_dim=64)
manifest = make_manifest(big, big)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    write_artifact(Path(sys.argv[1]), manifest, random_tensors(manifest))
except KvhubError as error:
    print(type(error).__name__, error.exit_code, error.message)
"""


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path):
    """The kernel refuses to let a file grow past 1 MiB; the weights are 4 MiB."""
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "out" / "m"), tests]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.stdout.startswith("KvhubError 1 cannot write"), found.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_a_full_disk(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        big = make_identity(num_layers=2, num_kv_heads=8, head_dim=64)
        manifest = make_manifest(big, big)
        with pytest.raises(KvhubError, match="disk is full") as caught:
            write_artifact(disk / "m", manifest, random_tensors(manifest))
        assert "nothing half-written is left" in caught.value.hint
        assert list(disk.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(AccessDenied):
            write_artifact(tmp_path / "m", pair(), random_tensors(pair()))
    finally:
        tmp_path.chmod(0o700)


def test_ctrl_c_leaves_nothing(tmp_path, monkeypatch):
    real, calls = module.os.fsync, []

    def interrupt(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(descriptor)

    monkeypatch.setattr(module.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_artifact(tmp_path / "m", pair(), random_tensors(pair()))
    assert not any(tmp_path.iterdir())
