"""A mapper of some of the target's heads computes what the whole one computes for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.mappers import make_identity, make_manifest

from kvhub.artifact.tensors import expected_tensors
from kvhub.errors import Incompatible
from kvhub.exchange.shards import HeadSlice
from kvhub.mapper import SourceRows
from kvhub.mapper.narrow import narrow
from kvhub.mapper.quantize import quantized
from kvhub.mapper.ridge import RidgeMapper

TOKENS = 9


def made(support: str, **changes: str) -> RidgeMapper:
    heads = {"num_attention_heads": 8, "num_kv_heads": 4}
    source = make_identity("org/source", num_layers=3, **(heads if support == "head-local" else {}))
    target = make_identity("org/target", **heads, k_norm="family" in changes)
    manifest = make_manifest(source, target, k=2, support=support, **changes)
    generator = torch.Generator().manual_seed(5)
    tensors = {n: torch.randn(s, generator=generator) for n, s in expected_tensors(manifest).items()}
    return RidgeMapper(manifest, tensors)


def rows_of(mapper: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    shape = mapper.manifest.source.geometry
    generator = torch.Generator().manual_seed(6)
    made = torch.randn(2, shape.num_layers, TOKENS, shape.num_kv_heads, shape.head_dim, generator=generator)
    return list(made[0]), list(made[1])


@pytest.mark.parametrize("int8", [False, True], ids=["float32", "int8"])
@pytest.mark.parametrize("family", ["ridge", "ridge-k-norm"])
@pytest.mark.parametrize("support", ["full", "head-local"])
@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (0, 4), (3, 4), (5, 8)])
def test_each_rank_gets_its_heads(support: str, rank: int, size: int, family: str, int8: bool) -> None:
    whole = made(support) if family == "ridge" else made(support, family=family)
    if int8:
        whole = RidgeMapper(*quantized(whole))
    heads = HeadSlice.of_rank(rank, size, 4)
    part = narrow(whole, heads)
    keys, values = rows_of(whole)
    needed = part.manifest.source.geometry.num_kv_heads
    assert needed == (heads.count if support == "head-local" else 2)
    chosen = slice(heads.first, heads.first + heads.count)
    if support == "head-local":
        keys_here, values_here = [k[:, chosen] for k in keys], [v[:, chosen] for v in values]
    else:
        keys_here, values_here = keys, values
    positions, rope = torch.arange(TOKENS), whole.manifest.source.rope
    for layer in range(2):
        expected = whole.map_layer(layer, SourceRows(keys, values, positions, rope))
        found = part.map_layer(layer, SourceRows(keys_here, values_here, positions, rope))
        for side, other in zip(found, expected, strict=True):
            assert side.shape == (TOKENS, heads.count, 4)
            torch.testing.assert_close(side, other[:, chosen], rtol=1e-5, atol=1e-5)


def test_all_heads_are_the_mapper_itself() -> None:
    whole = made("full")
    assert narrow(whole, HeadSlice.everything(4)) is whole


def test_another_family_is_refused_by_name() -> None:
    class Other(RidgeMapper):
        pass

    whole = made("full")
    other = Other(whole.manifest, whole._tensors)
    with pytest.raises(Incompatible, match="cannot be divided") as error:
        narrow(other, HeadSlice.of_rank(0, 2, 4))
    assert error.value.code == "tensor_parallel"
