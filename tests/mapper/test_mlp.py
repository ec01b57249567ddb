"""The mlp family against a computation written out in numpy, float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.mappers import make_identity, make_manifest, random_tensors

from kvhub.artifact.manifest import Perceptron
from kvhub.artifact.tensors import expected_tensors, tensor_bytes
from kvhub.artifact.write import write_artifact
from kvhub.errors import Corrupt
from kvhub.mapper import Mapper, SourceRows
from kvhub.mapper.mlp import MlpMapper
from kvhub_kernels import mlp
from kvhub_kernels.resident import Resident
from kvhub_kernels.rows import Rows

TOKENS = 11
CASES = {
    "one a head": ("full", "head"),
    "one a layer": ("full", "layer"),
    "head-local": ("head-local", "head"),
}


def made(case: str, weights_dtype: str = "float32") -> tuple[MlpMapper, dict[str, torch.Tensor]]:
    support, per = CASES[case]
    source = make_identity(num_layers=4, num_kv_heads=3, head_dim=6)
    heads = 3 if support == "head-local" else 2
    target = make_identity(num_layers=2, num_kv_heads=heads, head_dim=8)
    manifest = make_manifest(
        source,
        target,
        k=2,
        support=support,
        family="mlp",
        perceptron=Perceptron(hidden=[7, 5], per=per),
        weights_dtype=weights_dtype,
    )
    tensors = random_tensors(manifest)
    return MlpMapper(manifest, tensors), tensors


def rows_of(mapper: MlpMapper) -> SourceRows:
    generator = torch.Generator().manual_seed(3)
    keys = [torch.randn(TOKENS, 3, 6, generator=generator) for _ in range(4)]
    values = [torch.randn(TOKENS, 3, 6, generator=generator) for _ in range(4)]
    return SourceRows(keys, values, torch.arange(TOKENS) * 37 + 5, mapper.manifest.source.rope)


def definition(mapper: MlpMapper, tensors: dict[str, torch.Tensor], layer: int, side: str) -> np.ndarray:
    """[tokens, H_t, D_t] before the rotation: every token and head by itself."""
    manifest, rows = mapper.manifest, rows_of(mapper)
    chosen = manifest.source_layers[layer]
    given = [(rows.content_keys(one) if side == "k" else rows.values(one)).double().numpy() for one in chosen]
    parts = {
        name.removeprefix(f"layers.{layer}.{side}."): tensor.double().numpy()
        for name, tensor in tensors.items()
        if name.startswith(f"layers.{layer}.{side}.")
    }
    shape = manifest.target.geometry
    out = np.zeros((TOKENS, shape.num_kv_heads, shape.head_dim))
    for token in range(TOKENS):
        for head in range(shape.num_kv_heads):
            local = manifest.support == "head-local"
            seen = [row[token, head] if local else row[token].ravel() for row in given]
            group = head if manifest.perceptron.per == "head" else 0
            x = np.concatenate(seen)
            for part in ("hidden1.", "hidden2."):
                x = np.maximum(x @ parts[f"{part}weight"][group] + parts[f"{part}bias"][group], 0)
            x = x @ parts["weight"][group] + parts["bias"][group]
            one = manifest.perceptron.per == "layer"
            out[token, head] = x.reshape(shape.num_kv_heads, -1)[head] if one else x
    return out


@pytest.mark.parametrize("case", CASES)
def test_against_the_definition(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "CHUNK", 4)
    mapper, tensors = made(case)
    rows = rows_of(mapper)
    for layer in range(2):
        keys, values = mapper.map_layer(layer, rows)
        wanted = torch.from_numpy(definition(mapper, tensors, layer, "v"))
        torch.testing.assert_close(values.double(), wanted, rtol=1e-5, atol=1e-5)
        table = rows.table(mapper.manifest.target.rope)
        wanted = torch.from_numpy(definition(mapper, tensors, layer, "k"))
        half = wanted.shape[-1] // 2
        turned = torch.view_as_complex(
            torch.stack((wanted[..., :half], wanted[..., half:]), -1)
        ) * torch.polar(
            torch.ones_like(table.cos, dtype=torch.float64),
            torch.atan2(table.sin, table.cos).double(),
        ).unsqueeze(1)
        wanted = torch.cat((turned.real, turned.imag), -1)
        torch.testing.assert_close(keys.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_into_a_pool(case: str) -> None:
    mapper, _ = made(case)
    rows, shape = rows_of(mapper), mapper.manifest.target.geometry
    pools = [torch.full((40, shape.num_kv_heads, 8), float("nan")) for _ in range(4)]
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:TOKENS]
    mapper.prepare("cpu", torch.float32)
    assert bool(mapper.map_rows(rows, Rows(pools[:2], pools[2:], TOKENS, slots)))
    for layer in range(2):
        for pool, wanted in zip((pools[layer], pools[2 + layer]), mapper.map_layer(layer, rows), strict=True):
            assert torch.equal(pool[slots], wanted)
            assert pool.isnan().sum() == (40 - TOKENS) * shape.num_kv_heads * 8
    rows.values(mapper.manifest.source_layers[1][0])[3, 1, 2] = float("inf")
    assert not bool(mapper.map_rows(rows, Rows(pools[:2], pools[2:], TOKENS, slots)))


def test_lower_precision_is_close_and_keeps_biases() -> None:
    mapper, tensors = made("one a head")
    coarse = mapper.to("cpu", torch.bfloat16)
    rows = rows_of(mapper)
    for fine, rough in zip(mapper.map_layer(0, rows), coarse.map_layer(0, rows), strict=True):
        assert rough.dtype == torch.bfloat16
        assert 1e-4 < (rough.float() - fine).norm() / fine.norm() < 0.03
    assert torch.equal(coarse.layers(0, "k")[2].bias, tensors["layers.0.k.bias"])


def test_an_artifact_is_read_back(tmp_path) -> None:  # type: ignore[no-untyped-def]
    mapper, tensors = made("one a head", "bfloat16")
    manifest = write_artifact(tmp_path / "m", mapper.manifest, tensors)
    weights = sum(tensor.nbytes for tensor in tensors.values())
    assert weights / 2 < tensor_bytes(manifest) < weights  # weights halved, biases not
    loaded = Mapper.from_pretrained(tmp_path / "m")
    assert isinstance(loaded, MlpMapper)
    rows = rows_of(mapper)
    torch.testing.assert_close(loaded.map_layer(1, rows)[1], mapper.map_layer(1, rows)[1], rtol=0.1, atol=0.1)


def test_what_contradicts_itself_is_refused() -> None:
    mapper, tensors = made("one a layer")
    source, target = mapper.manifest.source, mapper.manifest.target
    with pytest.raises(ValueError, match="perceptron"):
        make_manifest(source, target, family="mlp")
    with pytest.raises(ValueError, match="perceptron"):
        make_manifest(source, target, perceptron=Perceptron(hidden=[7, 5], per="head"))
    with pytest.raises(ValueError, match="one network a head"):
        make_manifest(
            source,
            source,
            family="mlp",
            support="head-local",
            perceptron=Perceptron(hidden=[7, 5], per="layer"),
        )
    local = make_manifest(
        source, target, family="mlp", support="head-local", perceptron=Perceptron(hidden=[7, 5], per="head")
    )
    with pytest.raises(Corrupt, match="as many source heads"):
        expected_tensors(local)
    with pytest.raises(Corrupt, match=r"hidden1\.weight"):
        MlpMapper(mapper.manifest, tensors | {"layers.1.v.hidden1.weight": torch.zeros(1, 9, 7)})


def test_the_digest_of_other_families_is_what_it_was() -> None:
    identity = make_identity()
    assert b"perceptron" not in make_manifest(identity, identity).to_bytes()
    assert b"training" not in make_manifest(identity, identity).to_bytes()


def test_mappers_on_another_device_share_a_budget():
    """As the ridge's do; where the caches are on the mapper's own device there is nothing to keep."""
    (one, _), (other, _) = made("one a head"), made("one a layer")
    sizes = []
    for mapper in (one, other):
        alone = Resident(budget=1 << 20)
        mapper.prepare("meta", torch.bfloat16)
        assert mapper._placed
        mapper.keep_in(alone)
        assert not mapper._placed  # what was kept without a bound is let go
        mapper.prepare("cpu", torch.bfloat16)
        assert alone.nbytes == 0 and mapper.hold("cpu", torch.bfloat16) is mapper
        mapper.prepare("meta", torch.bfloat16)
        placed = mapper.hold("meta", torch.bfloat16)
        assert isinstance(placed, MlpMapper) and placed.dtype == torch.bfloat16
        assert alone.nbytes == sum(tensor.nbytes for tensor in placed._tensors.values())
        sizes.append(alone.nbytes)
    resident = Resident(budget=max(sizes) + min(sizes) // 2)
    one.keep_in(resident)
    other.keep_in(resident)
    one.prepare("meta", torch.float16)
    other.prepare("meta", torch.float16)
    assert one.hold("meta", torch.float16) is None and other.hold("meta", torch.float16) is not None
    other.let_go()
    assert resident.nbytes == 0
    one.keep_in(Resident(budget=sizes[0] - 1))
    with pytest.raises(ValueError, match="does not fit"):
        one.prepare("meta", torch.float16)
