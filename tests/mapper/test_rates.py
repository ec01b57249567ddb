"""The rates that `benchmarks.fit` and `benchmarks.handoff` print, against counts that are made otherwise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.mappers import make_identity, make_manifest, random_tensors
from support.tiny import make_tiny
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.fit import bytes_of_rows, forward, forward_flops, head_by_head, measure, moment_flops
from benchmarks.handoff_rates import rates, top_of
from kvhub.fit.capture import capture
from kvhub.fit.moments import PairMoments
from kvhub.mapper.ridge import RidgeMapper
from kvhub.model.load import load_model


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("rates")
    source = make_tiny(root / "source", model_type="llama", layers=2, kv_heads=1)
    return load_model(source), load_model(make_tiny(root / "target"))


def in_place(total, left, right, out_shape=None, **options):
    return 2 * left[0] * left[1] * right[1]


def counted(what):
    """FLOPs of `what` as torch counts them; of attention on a CPU it counts none."""
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        what()
    return counter.get_total_flops()


def test_flops_of_a_forward(pair):
    window = torch.arange(32) % 50
    for model in pair:
        geometry, config = model.identity.geometry, model.model.config
        square = 4 * 32**2 * config.num_attention_heads * geometry.head_dim * geometry.num_layers
        found = counted(lambda model=model: forward(model, window))
        assert forward_flops(model, 32) == found + square // 2


@pytest.mark.parametrize("both", [False, True])
def test_flops_of_moments(pair, both):
    window = torch.arange(64) % 50
    rows = [capture(model, window).rows(range(0, 64, 2)) for model in pair]
    shapes = [model.identity.geometry for model in pair]
    moments = PairMoments.zeros(*shapes, both=both)
    moments.add(*rows)
    assert counted(moments.fold) == moment_flops(moments, 32)
    given = SimpleNamespace(heads=[shape.head_dim for shape in shapes], both=both)
    assert counted(lambda: head_by_head(*rows, given)) == head_by_head(*rows, given)
    one = capture(pair[0], window)
    width = rows[0][0].shape[1]
    assert bytes_of_rows(one, rows[0]) == 32 * width * (4 + one.values[0].element_size() + 2 * 8)


def test_a_fit_beside_its_ceilings(pair):
    given = SimpleNamespace(length=32, stride=2, both=False, dtype="float32")
    found = measure(*pair, torch.arange(96).view(3, 32) % 50, given)
    for name in ("forwards", "moments", "head_by_head"):
        assert found[f"{name}_gflops"] >= 0 and 0 <= found[f"{name}_of_ceiling"] < 2
    assert found["ceiling_float64_gflops"] > 1 and found["ceiling_copy_gbytes_per_second"] > 0.1
    assert 0 < found["target_forward_s"] < found["forwards_s"]


def test_a_handoff_beside_its_ceilings():
    """2 layers, k = 1: 8 matrices of the size of both sides; 100 rows in 2 ms."""
    source = make_identity("org/source", num_layers=2, num_kv_heads=2, head_dim=8)
    target = make_identity("org/target", num_layers=2, num_kv_heads=2, head_dim=16)
    manifest = make_manifest(source, target, source_layers=[[0], [1]])
    mapper = RidgeMapper(manifest, random_tensors(manifest))
    top = top_of(mapper)
    assert top["gflops"] > 1 and top["gbytes_per_second"] > 0.1
    found = rates(mapper, 100, 2.0, 50.0, {"gflops": 10.0, "gbytes_per_second": 4.0})
    flops = 100 * 2 * 2 * 2 * 16 * 32  # layers, sides, a multiplication and an addition
    assert found["gflops"] == round(flops / 2e-3 / 1e9, 1)
    assert found["fraction_of_ceiling"] == round(flops / 2e-3 / 1e10, 3)
    item = getattr(torch, target.dtype).itemsize
    moved = 4 * 2 * 2 * (16 * 32 + 32) + 100 * 2 * 2 * (16 + 32) * item
    assert found["gbytes_per_second"] == round(moved / 2e-3 / 1e9, 2)
    assert found["prefill_over_handoff"] == 25 and found["eager_ms"] > 0 and found["products"] == "float32"
