"""Rows are mapped where a mapper is ready, and nothing is built for them on the scheduler's thread."""

from __future__ import annotations

import pytest
import torch
from support.mappers import make_identity, make_manifest, random_tensors

from kvhub.mapper.ridge import RidgeMapper
from kvhub_kernels.resident import Resident

pytest.importorskip("sglang")

from kvhub_sglang.place import Pool, _map, _Run
from kvhub_sglang.refusal import Code, Refusal
from kvhub_sglang.serving import Candidate

TOKENS = 8


class Blocks(_Run):
    """Rows of one tensor."""

    @property
    def pieces(self):
        return [torch.randn(5, 2, TOKENS, 3, 16, generator=torch.Generator().manual_seed(1))]


class Cache:
    def __init__(self):
        self.k_buffer, self.v_buffer = ([torch.zeros(TOKENS, 3, 32) for _ in range(4)] for _ in "kv")


def made():
    source = make_identity(num_layers=5, num_kv_heads=3, head_dim=16)
    target = make_identity(num_layers=4, num_kv_heads=3, head_dim=32)
    manifest = make_manifest(source, target, k=3)
    mapper = RidgeMapper(manifest, random_tensors(manifest))
    return Candidate(mapper, manifest.digest, source, draft=False)


def test_a_mapper_that_went_is_not_built_on_the_scheduler(monkeypatch):
    one, other = made(), made()
    one.mapper.prepare("cpu", torch.float32)
    size = next(iter(one.mapper._appliers.values())).nbytes
    resident = Resident(size + size // 2)
    for candidate in (one, other):
        candidate.mapper.keep_in(resident)
        candidate.mapper.prepare("cpu", torch.float32)  # on a worker; the second drops the first
    run = Blocks(one, 0, [], 0, TOKENS, [])
    built = []
    real = RidgeMapper.weights
    monkeypatch.setattr(RidgeMapper, "weights", lambda self: built.append(self) or real(self))
    pool, slots = Pool(Cache()), torch.arange(TOKENS)
    with pytest.raises(Refusal, match="--mapper-gib") as refused:
        _map(run, one, pool, slots)
    assert refused.value.code == Code.CAPACITY and not built
    assert not any(layer.any() for layer in (*pool.keys, *pool.values))
    _map(run, other, pool, slots)
    assert not built and all(layer.any() for layer in (*pool.keys, *pool.values))
