"""safetensors headers that are lies."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from kvhub.errors import Corrupt, NotFound
from kvhub.model.headers import read_header


def write(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_reads_what_the_official_library_wrote(tmp_path):
    path = tmp_path / "m.safetensors"
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert {name: (item.dtype, item.shape) for name, item in header.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (4,)),
    }
    raw = path.read_bytes()
    assert raw[header["a"].start : header["a"].end] == tensors["a"].numpy().tobytes()


CASES = {
    "huge length": ((1 << 60).to_bytes(8, "little") + b"{}", "shorter"),
    "empty": (b"", "shorter"),
    "no json": ((2).to_bytes(8, "little") + b"xx", "JSON"),
    "not utf-8": ((2).to_bytes(8, "little") + b"\xff\xfe", "JSON"),
    "array": ((2).to_bytes(8, "little") + b"[]", "object"),
}


@pytest.mark.parametrize("case", CASES)
def test_malformed_files(tmp_path, case):
    data, words = CASES[case]
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(Corrupt, match=words):
        read_header(path)


HEADERS = {
    "duplicate key": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        4,
    ),
    "deep nesting": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0),
    "huge integer": (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', 4),
    "negative offset": ({"a": entry([1], -4, 0)}, 0),
    "gap": ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, 12),
    "overlap": ({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, 8),
    "tail": ({"a": entry([1], 0, 4)}, 8),
    "truncated": ({"a": entry([2], 0, 8)}, 4),
    "shape lies": ({"a": entry([3], 0, 8)}, 8),
    "shape product overflows": ({"a": entry([1 << 32, 1 << 32, 1 << 32], 0, 8)}, 8),
    "bool shape": ({"a": entry([True], 0, 4)}, 4),
    "not an entry": ({"a": 5}, 0),
    "extra key": ({"a": entry([1], 0, 4) | {"x": 1}}, 4),
}


@pytest.mark.parametrize("case", HEADERS)
def test_lying_headers(tmp_path, case):
    header, size = HEADERS[case]
    with pytest.raises(Corrupt):
        read_header(write(tmp_path / "m.safetensors", header, bytes(size)))


def test_limit_is_checked_before_reading(tmp_path):
    path = write(tmp_path / "m.safetensors", {"__metadata__": {"a": "x" * 1000}})
    assert read_header(path) == {}
    with pytest.raises(Corrupt, match="more than 100"):
        read_header(path, limit=100)


def test_absent(tmp_path):
    with pytest.raises(NotFound):
        read_header(tmp_path / "m.safetensors")
