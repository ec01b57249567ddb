"""All layers at once into a pool, against layer by layer."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.mappers import make_identity, make_manifest, random_tensors

from kvhub.mapper.base import Mapper, SourceRows
from kvhub.mapper.ridge import RidgeMapper
from kvhub_kernels.resident import Resident
from kvhub_kernels.rows import Rows

TOKENS = 30


def made(support, dtype=torch.float32, **options):
    source = make_identity(num_layers=5, num_kv_heads=3, head_dim=16)
    target = make_identity(num_layers=4, num_kv_heads=3, head_dim=32, k_norm=True)
    manifest = make_manifest(source, target, k=3, support=support, **options)
    mapper = RidgeMapper(manifest, random_tensors(manifest), dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    # As blocks arrive: one tensor, of which the middle is wanted.
    blocks = torch.randn(5, 2, TOKENS + 20, 3, 16, generator=generator)[:, :, 7 : 7 + TOKENS]
    rows = SourceRows(
        list(blocks[:, 0].unbind(0)), list(blocks[:, 1].unbind(0)), torch.arange(TOKENS) + 7, source.rope
    )
    pools = [torch.full((70, 3, 32), float("nan")) for _ in range(8)]
    target_rows = Rows(pools[:4], pools[4:], TOKENS, torch.randperm(70, generator=generator)[:TOKENS])
    return mapper, rows, target_rows


@pytest.mark.parametrize("support", ["full", "head-local"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [RidgeMapper.map_rows, Mapper.map_rows], ids=["kernels", "any family"])
@pytest.mark.parametrize("family", ["ridge", "ridge-k-norm"])
def test_the_same_rows_as_layer_by_layer(support, dtype, way, family):
    mapper, rows, target = made(support, dtype, family=family)
    finite = way(mapper, rows, target)
    assert finite.shape == () and bool(finite)
    for layer in range(4):
        want = mapper.to("cpu", torch.float32).map_layer(layer, rows)
        for pool, truth in zip((target.keys[layer], target.values[layer]), want, strict=True):
            error = (pool[target.slots] - truth).norm() / truth.norm()
            assert error < (1e-6 if dtype == torch.float32 else 1e-2)
            assert pool.isnan().sum() == (70 - TOKENS) * 3 * 32


@pytest.mark.parametrize("way", [RidgeMapper.map_rows, Mapper.map_rows], ids=["kernels", "any family"])
def test_not_finite(way):
    mapper, rows, target = made("full")
    rows._values[1][3, 1, 2] = float("inf")
    assert not bool(way(mapper, rows, target))


def test_weights_are_not_copied():
    mapper, rows, target = made("full")
    weight, _ = mapper.affine(1, "v")
    assert mapper.weights().sides[1][1].weight.data_ptr() == weight.data_ptr()
    mapper.map_rows(rows, target)
    assert len(mapper._appliers) == 1
    mapper.map_rows(rows, target)
    assert len(mapper._appliers) == 1


@pytest.mark.parametrize("support", ["full", "head-local"])
def test_a_bias_is_not_rounded_with_the_weights(support):
    mapper, _, _ = made(support)
    tensors = dict(mapper._tensors)
    tensors["layers.2.v.bias"] = tensors["layers.2.v.bias"] + 300.7
    exact = RidgeMapper(mapper.manifest, tensors)
    coarse = exact.to("cpu", torch.bfloat16)
    assert torch.equal(coarse.affine(2, "v").bias, exact.affine(2, "v").bias)


@pytest.mark.parametrize("support", ["full", "head-local"])
@pytest.mark.parametrize("way", [RidgeMapper.map_blocks, Mapper.map_blocks], ids=["kernels", "any family"])
def test_blocks_from_an_exchange_give_the_same_rows(support, way):
    mapper, rows, target = made(support)
    pieces = [torch.stack((k, v)) for k, v in zip(rows._keys, rows._values, strict=True)]
    blocks = list(torch.stack(pieces).split([5, 16, 9], dim=2))
    assert bool(way(mapper, blocks, rows.positions, target))
    found = [pool.clone() for pool in (*target.keys, *target.values)]
    mapper.map_rows(rows, target)
    for have, want in zip(found, (*target.keys, *target.values), strict=True):
        torch.testing.assert_close(have, want, equal_nan=True)


@pytest.mark.parametrize("way", [RidgeMapper.map_blocks, Mapper.map_blocks], ids=["kernels", "any family"])
def test_threads_share_a_mapper_for_blocks(way):
    """Blocks are joined in a buffer of the mapper's: a second caller may not refill it under the first."""
    mapper, _, _ = made("full")
    given = [torch.randn(16, 5, 2, 64, 3, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    def run(blocks):
        pools = [torch.full((1024, 3, 32), float("nan")) for _ in range(8)]
        assert bool(way(mapper, list(blocks), torch.arange(1024), Rows(pools[:4], pools[4:], 1024)))
        return pools

    alone = [run(blocks) for blocks in given]
    with ThreadPoolExecutor(3) as team:
        found = list(team.map(run, given * 8))
    for number, pools in enumerate(found):
        assert all(map(torch.equal, pools, alone[number % 3]))


def test_mappers_share_a_budget():
    one, rows, target = made("full")
    other, _, _ = made("full")
    one.prepare("cpu", torch.float32)
    size = next(iter(one._appliers.values())).nbytes
    resident = Resident(budget=size + size // 2)
    for mapper in (one, other):
        mapper.keep_in(resident)
        assert not mapper._appliers  # what was kept without a bound is let go
    one.prepare("cpu", torch.float32)
    first = weakref.ref(one.applier(target.device, torch.float32, rows.strip))
    assert one.hold("cpu", torch.float32) is first()
    assert resident.nbytes == size
    assert bool(other.map_rows(rows, target))  # the same artifact in another object is another mapper
    assert resident.nbytes == size
    assert first() is None and one.hold("cpu", torch.float32) is None
    assert one.applier(target.device, torch.float32, rows.strip) is one.hold("cpu", torch.float32)
    one.keep_in(Resident(budget=size - 1))
    with pytest.raises(ValueError, match="does not fit"):
        one.prepare("cpu", torch.float32)
