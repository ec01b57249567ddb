"""Whatever the bytes, a reader gives what was written or a one-line error."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.mappers import make_identity, make_manifest, random_tensors

from kvhub.artifact.read import open_tensors, read_manifest
from kvhub.artifact.write import write_artifact
from kvhub.errors import KvhubError
from kvhub.model.headers import read_header
from kvhub.model.identity import canonical_json

FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture
def artifact(tmp_path):
    manifest = make_manifest(make_identity(), make_identity(), k=2)
    write_artifact(tmp_path / "m", manifest, random_tensors(manifest))
    return tmp_path / "m"


def places(value, path=()):
    """Every place in nested JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def check(call, sound):
    try:
        found = call()
    except KvhubError as error:
        assert error.message.isprintable()
        assert len(error.message) < 500
    else:
        assert sound(found)


@FUZZ
@given(data=st.data())
def test_manifest_with_one_value_replaced(artifact, data):
    good = (artifact / "manifest.json").read_bytes()
    content = json.loads(good)
    path = data.draw(st.sampled_from(sorted(places(content), key=str)))
    if not path:
        return
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = data.draw(JSON)
    try:
        forged = canonical_json(content) + b"\n"
    except UnicodeEncodeError:
        forged = json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    (artifact / "manifest.json").write_bytes(forged)
    try:
        check(lambda: read_manifest(artifact), lambda manifest: manifest.to_bytes() == forged)
    finally:
        (artifact / "manifest.json").write_bytes(good)


@FUZZ
@given(where=st.integers(0, 4000), bits=st.integers(1, 255), cut=st.none() | st.integers(0, 4000))
def test_manifest_with_a_byte_changed_or_cut(artifact, where, bits, cut):
    good = (artifact / "manifest.json").read_bytes()
    bad = bytearray(good)
    bad[where % len(bad)] ^= bits
    (artifact / "manifest.json").write_bytes(bad[:cut])
    try:
        check(lambda: read_manifest(artifact), lambda manifest: manifest.to_bytes() == bytes(bad[:cut]))
    finally:
        (artifact / "manifest.json").write_bytes(good)


@FUZZ
@given(where=st.integers(0, 1500), bits=st.integers(1, 255))
def test_weights_with_a_byte_changed_in_the_header(artifact, where, bits):
    file = artifact / "model.safetensors"
    manifest, good = read_manifest(artifact), file.read_bytes()
    expected = {name: tensor.shape for name, tensor in open_tensors(artifact, manifest).items()}
    start = min(tensor.start for tensor in read_header(file).values())
    bad = bytearray(good)
    bad[where % start] ^= bits
    file.write_bytes(bad)
    try:
        check(
            lambda: open_tensors(artifact, manifest),
            lambda found: {name: tensor.shape for name, tensor in found.items()} == expected,
        )
    finally:
        file.write_bytes(good)
