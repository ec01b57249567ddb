"""Safetensors written as the tensors are made, against the library's own writer."""

from __future__ import annotations

import hashlib
import io
import weakref

import pytest
import torch
from safetensors.torch import save
from support.mappers import make_identity, make_manifest, random_tensors

from kvhub.artifact.stream import KINDS, write_stream
from kvhub.artifact.write import write_artifact
from kvhub.errors import BadInput


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"note": 'a "word", ü'}])
def test_the_librarys_own_bytes(metadata: dict[str, str] | None) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{number}.{str(dtype)[6:]}": (100 * torch.rand(number, 3, generator=generator)).to(dtype)
        for number in (0, 2, 11)
        for dtype in KINDS
    }
    file = io.BytesIO()
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    digest, size = write_stream(file, kinds, tensors.__getitem__, metadata)
    assert file.getvalue() == save(tensors, metadata)
    assert (digest, size) == (hashlib.sha256(file.getvalue()).hexdigest(), len(file.getvalue()))


def test_a_large_tensor_is_converted_in_pieces() -> None:
    numbers = torch.arange(9_000_000, dtype=torch.float32).view(3000, 3000).t()
    file = io.BytesIO()
    write_stream(file, {"x": (torch.bfloat16, numbers.shape)}, lambda name: numbers)
    assert file.getvalue() == save({"x": numbers.to(torch.bfloat16).contiguous()})


def test_each_tensor_of_an_artifact_is_made_once_and_not_kept(tmp_path) -> None:  # type: ignore[no-untyped-def]
    manifest = make_manifest(make_identity(num_layers=2), make_identity(num_layers=2))
    tensors, made, alive = random_tensors(manifest), [], []

    class Made(dict):  # type: ignore[type-arg]
        def __getitem__(self, name: str) -> torch.Tensor:
            assert all(reference() is None for reference in alive), "one before it is still there"
            made.append(name)
            tensor = super().__getitem__(name).clone()
            alive.append(weakref.ref(tensor))
            return tensor

    write_artifact(tmp_path / "m", manifest, Made(tensors))
    assert sorted(made) == sorted(tensors)


def test_a_wrong_shape_found_while_writing_leaves_nothing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    manifest = make_manifest(make_identity(num_layers=2), make_identity(num_layers=2))
    tensors = random_tensors(manifest)
    name = max(tensors)
    with pytest.raises(BadInput, match=name):
        write_artifact(tmp_path / "m", manifest, tensors | {name: tensors[name][:-1]})
    assert list(tmp_path.iterdir()) == []
