"""The CPU path against the definition, in every form; `test_matrix.py` has every shape."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from support.applying import Case, again, check, make_problem, wrong_calls
from support.pairwise import cover

from kvhub_kernels.cpu import CpuApplier


def run(case, dtype=torch.float32, **options):
    problem = make_problem(case)
    applier = CpuApplier(problem.weights, dtype, **options)
    finite = applier.apply(problem.source, problem.target, problem.strip, problem.rotate)
    assert finite.shape == () and bool(finite)
    check(problem, rounded=dtype if dtype != torch.float32 else None)
    return problem, applier


CASES = {
    "the largest": Case(k=8, tokens=33, source=(8, 8, 256), target=(1, 8, 256)),
    "unequal sides": Case(source=(8, 3, 80), target=(2, 2, 96), k=8),
    "wider target": Case(source=(5, 1, 64), target=(9, 8, 128), k=2, tokens=17),
    "interleaved": Case(pairing=("interleaved", "interleaved")),
    "interleaved source": Case(pairing=("interleaved", "half"), support="head-local"),
    "partial": Case(partial=(0.5, 0.25), pairing=("half", "interleaved"), target=(2, 2, 128)),
    "scaled": Case(scale=(1.3, 0.7), partial=(0.5, 1.0)),
    "contiguous": Case(scattered=False, tokens=200),
    "half rows": Case(rows=torch.bfloat16, pool=torch.bfloat16, weights="bfloat16"),
    "float16": Case(rows=torch.float16, pool=torch.float16, support="head-local"),
    "int8": Case(weights="int8", k=8),
    "normalised": Case(normalised=True, target=(3, 3, 80), pairing=("half", "interleaved")),
    "normalised, head-local": Case("head-local", normalised=True, scattered=False, tokens=200),
    "normalised, int8": Case(normalised=True, weights="int8", pool=torch.bfloat16, partial=(1.0, 0.5)),
    "int8, head-local": Case(weights="int8", support="head-local", pool=torch.bfloat16),
    **cover(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_every_form(name, dtype):
    run(CASES[name], dtype)


@pytest.mark.parametrize("support", ["full", "head-local"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_of_tokens(support, dtype):
    run(Case(support, tokens=130, scattered=support == "full"), dtype, chunk=64)


def test_some_layers_only():
    problem = make_problem(Case(target=(5, 2, 64)))
    applier = CpuApplier(problem.weights)
    applier.apply(problem.source, problem.target, problem.strip, problem.rotate, layers=[1, 3])
    for layer in range(5):
        untouched = problem.target.keys[layer].isnan().all() and problem.target.values[layer].isnan().all()
        assert bool(untouched) == (layer not in (1, 3))
    check(problem, rounded=None, layers=range(1, 2))
    check(problem, rounded=None, layers=range(3, 4))


@pytest.mark.parametrize("support", ["full", "head-local"])
@pytest.mark.parametrize("pool", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_told(support, pool, bad):
    problem = make_problem(Case(support, pool=pool))
    for side in (problem.source.keys, problem.source.values):
        fresh = again(problem)
        layer = side[problem.plan.used[0]]
        kept = layer.clone()
        layer[problem.source.slots[5], 1, 3] = bad
        applier = CpuApplier(problem.weights)
        assert not applier.apply(problem.source, fresh.target, problem.strip, problem.rotate)
        layer.copy_(kept)
        assert applier.apply(problem.source, fresh.target, problem.strip, problem.rotate)


def test_overflow_of_a_narrow_pool_is_told():
    problem = make_problem(Case(pool=torch.float16))
    for layer in problem.source.values:
        layer.mul_(1e5)
    applier = CpuApplier(problem.weights)
    assert not applier.apply(problem.source, problem.target, problem.strip, problem.rotate)


@pytest.mark.parametrize("scattered", [True, False])
def test_many_large_values_in_a_narrow_pool_are_finite(scattered):
    """Each fits into float16; their sum, which says whether all are finite, does not."""
    problem = make_problem(Case(pool=torch.float16, scattered=scattered))
    for _, value in problem.weights.sides:
        value.bias.fill_(100)
    applier = CpuApplier(problem.weights)
    assert applier.apply(problem.source, problem.target, problem.strip, problem.rotate)
    check(problem, rounded=None)


@pytest.mark.parametrize("pool", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scattered", [True, False])
def test_large_values_are_finite_whatever_their_sum(scattered, pool):
    problem = make_problem(Case(tokens=40, pool=pool, scattered=scattered))
    for _, value in problem.weights.sides:
        value.bias.fill_(1e37)
    applier = CpuApplier(problem.weights)
    assert applier.apply(problem.source, problem.target, problem.strip, problem.rotate)
    problem.source.values[problem.plan.used[0]].view(-1)[:] = float("nan")
    assert not applier.apply(problem.source, problem.target, problem.strip, problem.rotate)


@pytest.mark.parametrize("scattered", [True, False])
def test_what_a_pool_rounds_up_to_infinity_is_told(scattered):
    """3.4e38 is a float32; the bfloat16 nearest to it is infinity."""
    problem = make_problem(Case(tokens=5, target=(1, 2, 64), pool=torch.bfloat16, scattered=scattered))
    _, value = problem.weights.sides[0]
    value.weight.zero_()
    value.bias.fill_(0).view(-1)[7] = 3.4e38
    applier = CpuApplier(problem.weights)
    one = replace(problem.source, tokens=1), replace(problem.target, tokens=1)
    assert not applier.apply(*one, problem.strip, problem.rotate)
    assert problem.target.values[0].isinf().any()
    value.bias.view(-1)[7] = 3.3e38
    assert applier.apply(*one, problem.strip, problem.rotate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_and_shared_between_threads(dtype):
    problem = make_problem(Case(tokens=120, k=5))
    applier = CpuApplier(problem.weights, dtype)
    copies = [again(problem) for _ in range(4)]
    threads = [
        threading.Thread(
            target=applier.apply, args=(problem.source, copy.target, problem.strip, problem.rotate)
        )
        for copy in copies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for copy in copies[1:]:
        for have, want in zip(copy.target.keys, copies[0].target.keys, strict=True):
            assert torch.equal(have.nan_to_num(7), want.nan_to_num(7))
    check(copies[0], rounded=dtype if dtype != torch.float32 else None)


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("padding", [1, 2, 4])
@pytest.mark.parametrize("offset", [0, 1])
def test_pools_whose_slots_are_no_whole_words(side, padding, offset):
    """A stride or an address that is no multiple of 16 bytes, beside buffers of our own that are."""
    problem = make_problem(Case(tokens=33))

    def spread(layer):
        slots, heads, dim = layer.shape
        room = torch.full((slots * (heads * dim + padding) + offset,), float("nan"), dtype=layer.dtype)
        return (
            room[offset:]
            .as_strided((slots, heads, dim), (heads * dim + padding, dim, 1), offset)
            .copy_(layer)
        )

    rows = getattr(problem, side)
    pools = {name: [spread(layer) for layer in getattr(rows, name)] for name in ("keys", "values")}
    setattr(problem, side, replace(rows, **pools))
    CpuApplier(problem.weights).apply(problem.source, problem.target, problem.strip, problem.rotate)
    check(problem, rounded=None)


def test_layers_may_be_none_and_any_iterable():
    problem = make_problem(Case(tokens=20, target=(3, 2, 64)))
    applier = CpuApplier(problem.weights)
    arguments = (problem.source, problem.target, problem.strip, problem.rotate)
    assert bool(applier.apply(*arguments, []))
    assert all(layer.isnan().all() for layer in problem.target.keys)
    assert bool(applier.apply(*arguments, iter(range(3))))
    check(problem, rounded=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_column_whose_scale_is_nothing_is_its_bias(dtype):
    problem = make_problem(Case(tokens=20, weights="int8"))
    for pair in problem.weights.sides:
        for affine in pair:
            affine.scale[0, 3::7] = 0
    CpuApplier(problem.weights, dtype).apply(problem.source, problem.target, problem.strip, problem.rotate)
    check(problem, rounded=dtype if dtype != torch.float32 else None)


def test_nothing_is_allocated_twice():
    problem, applier = run(Case(tokens=100))
    held = applier.workspace.nbytes
    applier.apply(problem.source, problem.target, problem.strip, problem.rotate)
    assert held > 0 and applier.workspace.nbytes == held
    # 100 rows of anything are a kilobyte or more; a scalar is a few bytes.
    with torch.profiler.profile(profile_memory=True) as profile:
        applier.apply(problem.source, problem.target, problem.strip, problem.rotate)
    sizes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert sizes and max(sizes) < 100


def test_a_bias_far_larger_than_the_rows_keeps_their_digits():
    problem = make_problem(Case(tokens=40, target=(1, 2, 64), weights="bfloat16"))
    _, value = problem.weights.sides[0]
    # What a fit makes of keys with a large mean: x @ W carries it, the bias takes it away again.
    mean = torch.stack([problem.source.values[i] for i in problem.plan.source_layers[0]]).mean((0, 1))
    shift = (mean + 40).flatten().repeat(problem.plan.k)
    value.bias.copy_(-(shift @ value.weight[0].float())[None])
    for layer in problem.source.values:
        layer.add_(40)
    applier = CpuApplier(problem.weights, torch.bfloat16)
    applier.apply(problem.source, problem.target, problem.strip, problem.rotate)
    check(problem, rounded=torch.bfloat16)


@pytest.mark.parametrize("call", list(wrong_calls()), ids=lambda call: call[0])
def test_what_cannot_be_applied_is_refused_before_anything_is_written(call):
    _, arguments, options = call
    applier = CpuApplier(make_problem(Case(tokens=9, k=2)).weights)
    with pytest.raises(ValueError):
        applier.apply(*arguments, **options)
    assert all(layer.isnan().all() for layer in (*arguments[1].keys, *arguments[1].values))


def test_values_of_another_stride():
    problem = make_problem(Case(tokens=9, k=2))
    spread = [layer.repeat(1, 2, 1)[:, :2] for layer in problem.source.values]
    problem.source = type(problem.source)(problem.source.keys, spread, 9, problem.source.slots)
    assert problem.source.values[0].stride(0) != problem.source.keys[0].stride(0)
    CpuApplier(problem.weights).apply(problem.source, problem.target, problem.strip, problem.rotate)
    check(problem, rounded=None)
