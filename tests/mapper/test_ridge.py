"""The ridge family against an independent computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.mappers import make_identity, make_manifest, random_tensors

from kvhub.errors import Corrupt
from kvhub.mapper.base import SourceRows
from kvhub.mapper.ridge import RidgeMapper

TOKENS = 9
POSITIONS = torch.tensor([0, 1, 2, 3, 17, 18, 500, 3000, 100_000])


def rows_of(identity, dtype=torch.float32, seed=3):
    generator = torch.Generator().manual_seed(seed)
    shape = (TOKENS, identity.geometry.num_kv_heads, identity.geometry.head_dim)
    layers = identity.geometry.num_layers
    keys = [torch.randn(shape, generator=generator).to(dtype) for _ in range(layers)]
    values = [torch.randn(shape, generator=generator).to(dtype) for _ in range(layers)]
    return SourceRows(keys, values, POSITIONS, identity.rope), keys, values


def turn(rows, identity, sign):
    """RoPE as complex numbers in float64: dimension i with i + D/2, angle position * frequency."""
    rows = rows.double().numpy()
    half = rows.shape[-1] // 2
    frequencies = np.float32(identity.rope.inverse_frequencies)
    angles = (POSITIONS.numpy().astype(np.float32)[:, None] * frequencies).astype(np.float64)
    turned = (rows[..., :half] + 1j * rows[..., half:]) * np.exp(sign * 1j * angles)[:, None, :]
    return torch.from_numpy(np.concatenate([turned.real, turned.imag], -1))


def reference(manifest, tensors, layer, keys, values):
    """The definition, written out over heads and dimensions, in float64."""
    source, target = manifest.source, manifest.target
    out = []
    for side, rows in (("k", [turn(key, source, -1) for key in keys]), ("v", [v.double() for v in values])):
        weight, bias = (tensors[f"layers.{layer}.{side}.{part}"].double() for part in ("weight", "bias"))
        result = torch.zeros(TOKENS, *bias.shape, dtype=torch.float64) + bias
        chosen, heads, dim = manifest.source_layers[layer], *rows[0].shape[1:]
        for index, source_layer in enumerate(chosen):
            for head in range(heads):
                x = rows[source_layer][:, head]
                if manifest.support == "head-local":
                    block = weight[head, index * dim : (index + 1) * dim]
                    result[:, head] += x @ block
                else:
                    start = (index * heads + head) * dim
                    result += (x @ weight[start : start + dim]).view(TOKENS, *bias.shape)
        if f"layers.{layer}.{side}.norm" in tensors:
            size = np.sqrt((result.numpy() ** 2).mean(-1, keepdims=True) + 1e-6)
            result = result / torch.from_numpy(size) * tensors[f"layers.{layer}.{side}.norm"].double()
        out.append(turn(result, target, +1) if side == "k" else result)
    return out


CASES = {
    "unequal heads and sizes": (
        "full",
        2,
        {"num_kv_heads": 3, "head_dim": 6},
        {"num_kv_heads": 2, "head_dim": 8},
    ),
    "one layer": ("full", 1, {}, {"num_layers": 5, "num_kv_heads": 1, "head_dim": 2}),
    "all layers": ("full", 4, {"num_layers": 4}, {"num_layers": 2}),
    "head-local": ("head-local", 3, {"num_layers": 4, "head_dim": 6}, {"head_dim": 10}),
    "normalised": ("full", 2, {"head_dim": 6}, {"num_kv_heads": 3, "head_dim": 8, "k_norm": True}),
    "normalised, head-local": ("head-local", 2, {}, {"k_norm": True}),
    "head-local, one head": ("head-local", 1, {"num_kv_heads": 1}, {"num_kv_heads": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_against_the_definition(case):
    support, k, source, target = CASES[case]
    family = "ridge-k-norm" if target.get("k_norm") else "ridge"
    manifest = make_manifest(
        make_identity(**source), make_identity(**target), k=k, support=support, family=family
    )
    tensors = random_tensors(manifest)
    mapper = RidgeMapper(manifest, tensors)
    rows, keys, values = rows_of(manifest.source)
    for layer in range(manifest.target.geometry.num_layers):
        found = mapper.map_layer(layer, rows)
        for have, want in zip(found, reference(manifest, tensors, layer, keys, values), strict=True):
            assert have.dtype == torch.float32
            torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-4)


def test_bfloat16_rounds_once_before_the_product():
    manifest = make_manifest(make_identity(), make_identity(), k=2, weights_dtype="bfloat16")
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in random_tensors(manifest).items()}
    mapper = RidgeMapper(manifest, tensors)
    rows, keys, values = rows_of(manifest.source, torch.bfloat16)
    want = reference(manifest, tensors, 1, keys, values)
    exact = mapper.map_layer(1, rows)
    rounded = mapper.to("cpu", torch.bfloat16).map_layer(1, rows)
    for precise, coarse, truth in zip(exact, rounded, want, strict=True):
        # float32 compute on bfloat16 rows and weights is exact to float32, whatever the storage.
        torch.testing.assert_close(precise.double(), truth, rtol=1e-5, atol=1e-4)
        assert coarse.dtype == torch.bfloat16
        error = (coarse.double() - truth).norm() / truth.norm()
        assert 1e-4 < error < 1e-2
    assert mapper.dtype == torch.float32  # a copy was moved, not the mapper


def test_content_keys_are_computed_once_per_layer_and_dtype():
    rows, _, _ = rows_of(make_identity())
    assert rows.content_keys(0, torch.float32) is rows.content_keys(0, torch.float32)
    assert rows.content_keys(0).dtype == torch.float32
    assert rows.content_keys(0, torch.bfloat16).dtype == torch.bfloat16
    rope = make_identity().rope
    assert rows.table(rope) is rows.table(rope)
    assert len(rows) == TOKENS


def test_misshapen_tensors():
    manifest = make_manifest(make_identity(), make_identity())
    tensors = random_tensors(manifest)
    del tensors["layers.1.v.bias"]
    with pytest.raises(Corrupt):
        RidgeMapper(manifest, tensors)
