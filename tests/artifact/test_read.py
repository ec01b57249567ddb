"""Reading: every fault is refused with one line, and nothing is believed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.mappers import make_identity, make_manifest, random_tensors

import kvhub.artifact.tensors
from kvhub.artifact.read import open_tensors, read_manifest, verify_artifact
from kvhub.artifact.tensors import expected_tensors
from kvhub.artifact.write import write_artifact
from kvhub.errors import Corrupt, Incompatible, NotFound
from kvhub.mapper.load import load_mapper
from kvhub.model.identity import canonical_json

WEIGHTS = "model.safetensors"


@pytest.fixture
def artifact(tmp_path):
    source, target = make_identity("org/a", num_layers=3), make_identity("org/b", head_dim=8)
    manifest = make_manifest(source, target, k=2, weights_dtype="bfloat16")
    write_artifact(tmp_path / "m", manifest, random_tensors(manifest))
    return tmp_path / "m"


def rewrite(path, change):
    """Change the manifest as a forger would: canonical bytes, consistent in itself."""
    content = json.loads((path / "manifest.json").read_text())
    change(content)
    (path / "manifest.json").write_bytes(canonical_json(content) + b"\n")


def retensor(path, change):
    """Change the tensors and make size and sha256 in the manifest agree with the new file."""
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / WEIGHTS)
    reseal(path)


def reseal(path):
    data = (path / WEIGHTS).read_bytes()

    def change(content):
        for entry in content["files"]:
            if entry["name"] == WEIGHTS:
                entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())

    rewrite(path, change)


def refused(path, words, *, kind=Corrupt):
    with pytest.raises(kind, match=words) as caught:
        load_mapper(path)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
    return caught.value


def test_a_sound_artifact_loads(artifact):
    (artifact / "README.md").write_text("card")
    (artifact / "assets").mkdir()
    (artifact / "assets" / "r2.png").write_bytes(b"x")
    (artifact / ".gitattributes").write_text("")
    assert load_mapper(artifact).manifest == read_manifest(artifact)


def test_missing_files(artifact, tmp_path):
    for name in (WEIGHTS, "config.json"):
        kept = (artifact / name).read_bytes()
        (artifact / name).unlink()
        refused(artifact, f"{name} is missing")
        (artifact / name).write_bytes(kept)
    (artifact / "manifest.json").unlink()
    refused(artifact, "not a mapper", kind=NotFound)
    with pytest.raises(NotFound):
        verify_artifact(tmp_path / "absent", deep=False)


@pytest.mark.parametrize(
    "name", ["extra.txt", "model.bin", "pytorch_model.bin", ".hidden", "Manifest.json", "sub"]
)
def test_extra_files(artifact, name):
    if name == "sub":
        (artifact / name).mkdir()
    else:
        (artifact / name).write_text("x")
    refused(artifact, "does not belong")


def test_truncated(artifact):
    data = (artifact / WEIGHTS).read_bytes()
    (artifact / WEIGHTS).write_bytes(data[:-1])
    refused(artifact, "bytes, the manifest says")
    reseal(artifact)
    refused(artifact, "geometry asks|shorter|describes")


@pytest.mark.parametrize("where", [8, 100, -1])
def test_bit_flipped(artifact, where):
    data = bytearray((artifact / WEIGHTS).read_bytes())
    data[where] ^= 0x10
    (artifact / WEIGHTS).write_bytes(data)
    verify_artifact(artifact, deep=False)  # sizes are right
    refused(artifact, "sha256")


def test_bit_flipped_config(artifact):
    data = bytearray((artifact / "config.json").read_bytes())
    data[-5] ^= 1
    (artifact / "config.json").write_bytes(data)
    refused(artifact, "config.json was changed")


def set_one(name, value):
    def change(tensors):
        tensors[name].view(-1)[3] = value

    return change


def swap_shape(tensors):
    tensors["layers.0.k.weight"] = tensors["layers.0.k.weight"].T


def reshape(tensors):
    tensors["layers.0.k.bias"] = tensors["layers.0.k.bias"].flatten()


def rename(tensors):
    tensors["layers.0.k.biaz"] = tensors.pop("layers.0.k.bias")


def swap_dtype(tensors):
    tensors["layers.0.k.weight"] = tensors["layers.0.k.weight"].to(torch.float16)


def round_bias(tensors):
    tensors["layers.0.k.bias"] = tensors["layers.0.k.bias"].to(torch.bfloat16)


FORGERIES = {
    "nan": (set_one("layers.1.v.weight", float("nan")), "NaN"),
    "infinite": (set_one("layers.0.k.bias", float("-inf")), "NaN or infinite"),
    "transposed": (swap_shape, r"is \[16, 16\]|is \[\d+, \d+\], not"),
    "flattened": (reshape, "not"),
    "renamed": (rename, "does not belong"),
    "float16": (swap_dtype, "is 'F16', not bfloat16"),
    "rounded bias": (round_bias, "geometry asks|is 'BF16', not float32"),
    "missing tensor": (lambda tensors: tensors.pop("layers.1.v.bias"), "geometry asks|is missing"),
    "extra tensor": (lambda tensors: tensors.update(x=torch.zeros(1)), "does not belong"),
}


@pytest.mark.parametrize("case", FORGERIES)
def test_wrong_tensors_under_a_right_sha256(artifact, case):
    change, words = FORGERIES[case]
    source, target = make_identity("org/a", num_layers=3, num_kv_heads=3), make_identity("org/b", head_dim=8)
    manifest = make_manifest(source, target, k=2, weights_dtype="bfloat16")  # weights not square
    for item in artifact.iterdir():
        item.unlink()
    artifact.rmdir()
    write_artifact(artifact, manifest, random_tensors(manifest))
    retensor(artifact, change)
    refused(artifact, words)


def test_a_missing_tensor_hidden_by_a_long_header(artifact):
    """The sizes still add up when the header makes up for the tensor's bytes."""
    tensors = load_file(artifact / WEIGHTS)
    lost = tensors.pop("layers.1.v.bias")
    save_file(tensors, artifact / WEIGHTS, metadata={"padding": "x" * 10 * lost.nbytes})
    reseal(artifact)
    refused(artifact, "'layers.1.v.bias' is missing")


def test_header_longer_than_the_bound(artifact):
    tensors = load_file(artifact / WEIGHTS)
    save_file(tensors, artifact / WEIGHTS, metadata={"padding": "x" * 25_000_000})
    reseal(artifact)
    refused(artifact, "geometry asks|header of")


@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "manifest.json", "README.md", "assets/x.png"])
def test_symlinks(artifact, tmp_path, name):
    (artifact / "assets").mkdir()
    place = artifact / name
    real = tmp_path / "real"
    real.write_bytes(place.read_bytes() if place.exists() else b"secret")
    place.unlink(missing_ok=True)
    place.symlink_to(real)
    refused(artifact, "not a plain file|not a regular file")


def test_a_pipe_does_not_hang(artifact):
    (artifact / "manifest.json").unlink()
    os.mkfifo(artifact / "manifest.json")
    refused(artifact, "not a regular file")


def raw(artifact, data):
    (artifact / "manifest.json").write_bytes(data)


def test_hostile_json(artifact):
    good = (artifact / "manifest.json").read_bytes()
    cases = {
        b"": "JSON",
        b"[]": "object",
        b"\xff\xfe": "JSON",
        b'{"a":' * 100_000: "deep|JSON",
        b'{"k":' + b"9" * 10_000 + b"}": "JSON",
        b'{"k":NaN}': "JSON",
        good[:-2] + b',"k":2}\n': "appears twice",
        good[:-2] + b',"unknown":2}\n': "unknown",
        good.replace(b'"k":2', b'"k":2.0'): "k",
        good.replace(b'"k":2', b'"k":"2"'): "k",
        good.replace(b'"k":2', b'"k": 2'): "canonical",
        good + b" ": "canonical",
        good[: len(good) // 2]: "JSON",
    }
    for data, words in cases.items():
        assert data != good
        raw(artifact, data)
        refused(artifact, words)
    raw(artifact, b'{"x":"' + b"y" * (5 << 20) + b'"}')
    refused(artifact, "larger than")


def test_newer_schema(artifact):
    rewrite(artifact, lambda content: content.update(schema_version=2, something_new=True))
    error = refused(artifact, "newer kvhub", kind=Incompatible)
    assert "upgrade" in error.hint
    for version in (0, -1, "1", None, 1.0):
        rewrite(artifact, lambda content, version=version: content.update(schema_version=version))
        refused(artifact, "schema_version|canonical|something_new")


def test_unknown_family(artifact):
    rewrite(artifact, lambda content: content.update(family="mlp2"))
    assert refused(artifact, "family", kind=Incompatible).code == "family"


def files(content, **changes):
    entry = next(item for item in content["files"] if item["name"] == WEIGHTS)
    entry.update(changes)


def grow(content):
    for side in ("source", "target"):
        content[side]["geometry"].update(num_kv_heads=1024, head_dim=1024, num_attention_heads=1024)


# What is changed // what the refusal says.
MANIFESTS = {
    "path upwards // files.*name": lambda c: files(c, name="../model.safetensors"),
    "absolute path // files.*name": lambda c: files(c, name="/etc/passwd"),
    "pickle // not those of one mapper": lambda c: files(c, name="pytorch_model.bin"),
    "huge size // geometry asks": lambda c: files(c, size=1 << 39),
    "negative size // size": lambda c: files(c, size=-1),
    "bad sha // sha256": lambda c: files(c, sha256="zz"),
    "no files // not those of one mapper": lambda c: c.update(files=[]),
    "twice // listed twice": lambda c: c.update(files=c["files"] + c["files"]),
    "huge geometry // geometry asks": grow,
    "head-local with unequal heads // head-local": lambda c: (
        c["source"]["geometry"].update(num_kv_heads=1),
        c.update(support="head-local"),
    ),
    "layer out of range // out of range": lambda c: c.update(source_layers=[[0, 3], [0, 1]]),
    "negative layer // out of range": lambda c: c.update(source_layers=[[-1, 0], [0, 1]]),
    "too few lists // one list per target layer": lambda c: c.update(source_layers=[[0, 1]]),
    "k of zero // k": lambda c: c.update(k=0, source_layers=[[], []]),
    "rope without frequencies // one inverse frequency": lambda c: c["target"]["rope"].update(
        inverse_frequencies=[]
    ),
    "rope wider than a head // wider than a head": lambda c: c["target"]["rope"].update(
        rotary_dim=64, inverse_frequencies=[1.0] * 32
    ),
    "infinite number // JSON|finite|canonical": lambda c: c.update(regularization=1e400),
    "normalised keys without k_norm // has no k_norm": lambda c: c.update(family="ridge-k-norm"),
    "large config // config.json is listed": lambda c: c["files"][0].update(size=5 << 20),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_manifests_that_lie(artifact, case):
    rewrite(artifact, MANIFESTS[case])
    refused(artifact, case.partition(" // ")[2])


def test_huge_geometry_allocates_nothing(artifact):
    """A manifest asking for 4 TB, with listed sizes to match, ends at the sizes on disk."""

    def change(content):
        grow(content)
        files(content, size=(1 << 40) - 1)

    rewrite(artifact, change)
    refused(artifact, "geometry asks")


def test_a_tensor_in_two_shards(artifact, tmp_path, monkeypatch):
    from kvhub.artifact import write

    monkeypatch.setattr(write, "SHARD_BYTES", 1)
    manifest = read_manifest(artifact)
    path = tmp_path / "sharded"
    write_artifact(path, manifest, random_tensors(manifest))
    load_mapper(path)
    first, second = path / "model-00001-of-00002.safetensors", path / "model-00002-of-00002.safetensors"
    save_file(load_file(second) | {"layers.0.k.bias": load_file(first)["layers.0.k.bias"]}, second)

    def change(content):
        for entry in content["files"]:
            data = (path / entry["name"]).read_bytes()
            entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())

    rewrite(path, change)
    refused(path, "two files")


def test_tensors_do_not_depend_on_the_file_afterwards(artifact):
    """A mapping would end the process when the file is truncated."""
    manifest = read_manifest(artifact)
    tensors = open_tensors(artifact, manifest)
    with (artifact / WEIGHTS).open("r+b") as file:
        file.truncate(0)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def test_expected_tensors_by_support():
    source, target = make_identity(num_layers=3, head_dim=6), make_identity(num_kv_heads=2, head_dim=4)
    full = expected_tensors(make_manifest(source, target, k=3))
    assert full["layers.1.k.weight"] == (3 * 2 * 6, 2 * 4)
    assert full["layers.1.v.bias"] == (2, 4)
    assert len(full) == 2 * 4
    local = expected_tensors(make_manifest(source, target, k=3, support="head-local"))
    assert local["layers.0.v.weight"] == (2, 3 * 6, 4)
    normed = make_identity(num_kv_heads=2, head_dim=4, k_norm=True)
    shapes = expected_tensors(make_manifest(source, normed, k=3, family="ridge-k-norm"))
    assert shapes["layers.1.k.norm"] == (4,)
    assert set(shapes) == {*full, "layers.0.k.norm", "layers.1.k.norm"}


def test_normalised_keys(tmp_path, monkeypatch):
    source, target = make_identity("org/a", num_layers=3), make_identity("org/b", k_norm=True)
    manifest = make_manifest(source, target, k=2, weights_dtype="bfloat16", family="ridge-k-norm")
    tensors = random_tensors(manifest)
    write_artifact(tmp_path / "m", manifest, tensors)
    assert torch.equal(load_mapper(tmp_path / "m").norm(1), tensors["layers.1.k.norm"])
    shutil.copytree(tmp_path / "m", tmp_path / "without")
    retensor(tmp_path / "without", lambda held: held.pop("layers.1.k.norm"))
    refused(tmp_path / "without", "layers.1.k.norm|geometry asks")
    shutil.copytree(tmp_path / "m", tmp_path / "infinite")
    retensor(tmp_path / "infinite", lambda held: held["layers.0.k.norm"].fill_(float("inf")))
    refused(tmp_path / "infinite", "layers.0.k.norm")
    # What an older kvhub, which does not know the family, says of it.
    monkeypatch.delitem(kvhub.artifact.tensors.FAMILIES, "ridge-k-norm")
    error = refused(tmp_path / "m", "family 'ridge-k-norm' are not known", kind=Incompatible)
    assert error.code == "family" and "upgrade kvhub" in error.hint


def test_reading_a_manifest_loads_no_torch(artifact):
    code = (
        "import sys; from pathlib import Path\n"
        "from kvhub.artifact.read import verify_artifact\n"
        "from kvhub.artifact.evidence import read_evidence\n"
        "path = Path(sys.argv[1]); read_evidence(path, verify_artifact(path, deep=True))\n"
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(artifact)], check=True, timeout=60)
