"""int8 weights as an artifact: written, read strictly, applied by both paths."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from support.mappers import make_identity, make_manifest, random_tensors

from kvhub.artifact.manifest import Manifest
from kvhub.artifact.open import check_tensors
from kvhub.artifact.write import write_artifact
from kvhub.cli.quantize import command
from kvhub.errors import BadInput, Corrupt, Incompatible
from kvhub.mapper.base import SourceRows
from kvhub.mapper.load import load_mapper
from kvhub.mapper.quantize import quantize
from kvhub.mapper.ridge import RidgeMapper
from kvhub_kernels.rows import Rows

TOKENS = 30


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVHUB_HOME", str(tmp_path / "home"))


def written(tmp_path, support="full", **options):
    source = make_identity("org/a", num_layers=4, num_kv_heads=2, head_dim=16)
    target = make_identity("org/b", num_layers=3, num_kv_heads=2, head_dim=8, k_norm="family" in options)
    manifest = make_manifest(source, target, k=2, support=support, **options)
    return write_artifact(tmp_path / "whole", manifest, random_tensors(manifest)), tmp_path / "whole"


def mapped(mapper):
    """Every target layer by `map_layer`, and into a pool by `map_rows`."""
    generator = torch.Generator().manual_seed(1)
    shape = (TOKENS, 2, 16)
    keys, values = ([torch.randn(shape, generator=generator) for _ in range(4)] for _ in "kv")
    rows = SourceRows(keys, values, torch.arange(TOKENS), mapper.manifest.source.rope)
    pools = [torch.full((TOKENS, 2, 8), float("nan")) for _ in range(6)]
    assert bool(mapper.map_rows(rows, Rows(pools[:3], pools[3:], TOKENS)))
    layers = [mapper.map_layer(layer, rows) for layer in range(3)]
    return [k for k, _ in layers] + [v for _, v in layers], pools


@pytest.mark.parametrize("options", [{}, {"family": "ridge-k-norm"}], ids=["plain", "normalised"])
@pytest.mark.parametrize("support", ["full", "head-local"])
def test_the_same_map_but_for_rounding(tmp_path, support, options):
    whole, directory = written(tmp_path, support, **options)
    assert whole.normalised == bool(options)
    place, manifest = quantize(directory)
    assert manifest.weights_dtype == "int8" and manifest.digest != whole.digest
    assert place.name == manifest.digest and sum(f.size for f in manifest.files) < 1.3e4
    check_tensors(place, manifest)
    mapper = load_mapper(place)
    assert isinstance(mapper, RidgeMapper) and mapper.weights().dtype == torch.int8
    exact, _ = mapped(load_mapper(directory))
    layers, pools = mapped(mapper)
    for one, pool, truth in zip(layers, pools, exact, strict=True):
        torch.testing.assert_close(pool, one, rtol=1e-5, atol=1e-4)  # both paths are one map
        assert 1e-4 < float((one - truth).norm() / truth.norm()) < 1.5e-2
    coarse, _ = mapped(mapper.to("cpu", torch.bfloat16))
    for one, truth in zip(coarse, layers, strict=True):
        assert float((one.float() - truth).norm() / truth.norm()) < 1e-2


def test_a_column_that_is_zero_stays_zero(tmp_path):
    source = make_identity("org/a")
    manifest = make_manifest(source, make_identity("org/b"))
    tensors = random_tensors(manifest)
    tensors["layers.1.v.weight"][:, 3] = 0
    write_artifact(tmp_path / "whole", manifest, tensors)
    mapper = load_mapper(quantize(tmp_path / "whole")[0])
    assert not mapper.affine(1, "v").weight[:, 3].any()


def test_what_cannot_be(tmp_path):
    _, directory = written(tmp_path)
    place, manifest = quantize(directory)
    with pytest.raises(BadInput, match="already"):
        quantize(place)
    tensors = dict(load_mapper(place)._tensors)
    bad = tensors | {"layers.0.k.scale": tensors["layers.0.k.scale"] * float("nan")}
    with pytest.raises(BadInput, match="NaN"):
        write_artifact(tmp_path / "bad", manifest.model_copy(update={"files": []}), bad)
    del tensors["layers.2.v.scale"]
    with pytest.raises(Corrupt):
        RidgeMapper(manifest, tensors)
    with pytest.raises(ValueError, match="int8"):
        Manifest.model_validate(manifest.model_dump() | {"family": "other"})


def test_command(tmp_path):
    _, directory = written(tmp_path)
    done = CliRunner().invoke(command, [str(directory), "--output", str(tmp_path / "small")])
    assert done.exit_code == 0, done.output
    assert "int8" in done.output and load_mapper(tmp_path / "small").manifest.weights_dtype == "int8"


def test_no_other_layout_has_it(tmp_path):
    from kvhub.interop.convert import export_mapper

    _, directory = written(tmp_path)
    with pytest.raises(Incompatible, match="int8"):
        export_mapper(quantize(directory)[0], tmp_path / "out", "kvtransfer")
