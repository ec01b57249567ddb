"""The Triton kernels against the definition, for a process with TRITON_INTERPRET=1: see `test_fused.py`."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch
from support.applying import Case, again, check, make_problem, wrong_calls
from support.pairwise import cover

from benchmarks.gpu_checks import EXTRAS
from benchmarks.gpu_checks import check as gpu_check

half, bf16 = torch.float16, torch.bfloat16
CASES = {
    "full": Case(tokens=19, k=2, source=(3, 2, 32), target=(2, 2, 32)),
    "head-local": Case("head-local", tokens=19, k=2, source=(3, 2, 32), target=(2, 2, 32)),
    "one token": Case(tokens=1, k=1, source=(2, 1, 64), target=(1, 1, 64), rows=bf16, pool=bf16),
    "odd sizes": Case(tokens=7, k=3, source=(4, 3, 40), target=(2, 2, 48), pairing=("half", "interleaved")),
    "odd, head-local": Case("head-local", tokens=17, k=3, source=(3, 3, 40), target=(2, 3, 48), rows=half),
    "all layers": Case(tokens=16, k=5, source=(5, 1, 80), target=(1, 2, 96), pool=half, scattered=False),
    "many layers": Case(tokens=9, k=31, source=(33, 1, 16), target=(2, 1, 32)),
    "more layers than fit in words": Case(tokens=9, k=33, source=(36, 1, 16), target=(3, 1, 32)),
    "interleaved": Case(tokens=9, k=1, source=(2, 2, 16), target=(2, 2, 16), pairing=("interleaved",) * 2),
    "partial": Case(tokens=9, k=2, source=(3, 2, 32), target=(2, 1, 32), partial=(0.5, 0.25)),
    "partial, interleaved": Case(
        tokens=9, k=1, source=(2, 2, 32), target=(2, 2, 32), pairing=("interleaved",) * 2, partial=(0.5, 0.25)
    ),
    "scaled": Case("head-local", 9, 2, (3, 2, 32), (2, 2, 32), scale=(1.4, 0.6), partial=(1.0, 0.5)),
    "bfloat16": Case(tokens=18, k=2, source=(3, 2, 32), target=(2, 2, 32), weights="bfloat16", pool=bf16),
    "int8": Case(tokens=18, k=2, source=(3, 2, 32), target=(2, 2, 32), weights="int8", rows=bf16, pool=bf16),
    "int8, head-local": Case("head-local", 18, 2, (3, 2, 32), (2, 2, 32), weights="int8"),
    "more pairs than a block": Case(tokens=9, k=1, source=(2, 8, 96), target=(1, 1, 32)),
    "normalised": Case(tokens=19, k=2, source=(3, 2, 32), target=(2, 3, 32), normalised=True),
    "normalised, head-local": Case(
        "head-local", 9, 2, (3, 2, 32), (2, 2, 16), rows=bf16, pool=bf16, normalised=True
    ),
    "normalised, int8, partial": Case(
        tokens=18,
        k=1,
        source=(3, 2, 32),
        target=(2, 2, 32),
        partial=(1.0, 0.5),
        weights="int8",
        normalised=True,
    ),
    "normalised, odd sizes, interleaved": Case(
        tokens=7, k=1, source=(2, 2, 16), target=(2, 5, 40), pairing=("half", "interleaved"), normalised=True
    ),
    "more columns than a tile": Case(tokens=33, k=1, source=(2, 2, 64), target=(1, 8, 96), scattered=False),
    **cover(),
}


def applier(problem, dtype, **options):
    from kvhub_kernels.gpu import TritonApplier

    return TritonApplier(problem.weights, problem.rotate, device="cpu", dtype=dtype, **options)


def compute_dtype(case):
    """bfloat16 where rows or pool are; else exact, so that an error of indexing cannot hide."""
    return bf16 if bf16 in (case.rows, case.pool) else torch.float32


@pytest.mark.parametrize("name", CASES)
def test_case(name):
    problem = make_problem(CASES[name])
    dtype = compute_dtype(problem.case)
    finite = applier(problem, dtype).apply(problem.source, problem.target, problem.strip, problem.rotate)
    assert int(finite) == 1
    # The interpreter cuts a bfloat16 off where a GPU rounds it: twice the error.
    check(problem, rounded=dtype, tolerance=8e-3 if dtype == bf16 else None)


@pytest.mark.parametrize("page", [1, 16, 64])
def test_pages(page):
    case = Case(tokens=70, k=1, source=(2, 1, 32), target=(1, 1, 32), scattered=False)
    problem = make_problem(case)
    count = -(-case.tokens // page) + 2
    pages = torch.randperm(count, generator=torch.Generator().manual_seed(page))
    generator = torch.Generator().manual_seed(1)
    source = [torch.randn(count * page, 1, 32, generator=generator) for _ in range(4)]
    target = [torch.full((count * page, 1, 32), float("nan")) for _ in range(2)]
    problem.source = type(problem.source)(source[:2], source[2:], case.tokens, pages.roll(1), page)
    problem.target = type(problem.source)(target[:1], target[1:], case.tokens, pages, page)
    written = problem.target.token_slots()
    assert written.shape == (case.tokens,) and written.unique().shape == written.shape
    problem.unused = torch.ones(count * page, dtype=torch.bool)
    problem.unused[written] = False
    applier(problem, torch.float32).apply(problem.source, problem.target, problem.strip, problem.rotate)
    check(replace(problem, target=replace(problem.target, slots=written, page_size=1)), rounded=None)


def test_some_layers_and_chunks_of_tokens():
    problem = make_problem(Case(tokens=37, k=2, source=(4, 1, 32), target=(4, 1, 32)))
    apply = applier(problem, torch.float32, chunk=16).apply
    apply(problem.source, problem.target, problem.strip, problem.rotate, layers=[1, 2])
    check(problem, rounded=None, layers=range(1, 3))
    assert problem.target.keys[0].isnan().all() and problem.target.values[3].isnan().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_told(bad):
    problem = make_problem(Case(tokens=18, k=1, source=(2, 1, 32), target=(1, 1, 32), pool=half))
    mapper = applier(problem, torch.float32)
    layer = problem.source.values[problem.plan.used[0]]
    kept = layer.clone()
    layer[problem.source.slots[17], 0, 31] = bad
    assert int(mapper.apply(problem.source, problem.target, problem.strip, problem.rotate)) == 0
    layer.copy_(kept)
    assert int(mapper.apply(problem.source, problem.target, problem.strip, problem.rotate)) == 1
    layer.mul_(1e6)  # beyond float16
    assert int(mapper.apply(problem.source, problem.target, problem.strip, problem.rotate)) == 0


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("column", [3, 19])
def test_what_is_not_finite_in_either_column_of_a_pair_is_told(column, tokens):
    """Of the two columns of a pair, 3 and 19 of 32, only one is too large for the pool: one value a token."""
    problem = make_problem(Case(tokens=tokens, k=1, source=(2, 1, 32), target=(1, 1, 32), pool=half))
    problem.weights.sides[0][1].bias[0, column] = 1e6
    mapper = applier(problem, torch.float32)
    assert int(mapper.apply(problem.source, problem.target, problem.strip, problem.rotate)) == 0
    stored = problem.target.values[0][problem.target.slots, 0]
    assert stored.isfinite().all(0).tolist() == [other != column for other in range(32)]


@pytest.mark.parametrize("tokens", [1, 17, 40])
def test_scratch_holds_whole_tiles_of_tokens(tokens):
    """The product loads whole tiles; on a GPU what lies behind the scratch is memory of others."""
    from kvhub_kernels.tiles import CANDIDATES, TABLE

    problem = make_problem(Case(tokens=tokens, k=2, source=(3, 2, 32), target=(2, 2, 32)))
    mapper = applier(problem, torch.float32, chunk=32)
    mapper.apply(problem.source, problem.target, problem.strip, problem.rotate)
    row = 2 * len(problem.plan.used) * 2 * 32
    held = mapper.workspace.held("x", torch.float32).numel() // row
    chunk = min(tokens, 32)
    for tile in {*TABLE.values(), *CANDIDATES}:
        assert held >= -(-chunk // tile.tokens) * tile.tokens


def test_the_same_twice_and_every_tile():
    from kvhub_kernels.tiles import Tile

    problem = make_problem(Case(tokens=40, k=2, source=(3, 2, 32), target=(2, 2, 32)))
    mapper = applier(problem, torch.float32)
    first = again(problem)
    mapper.apply(first.source, first.target, first.strip, first.rotate)
    for tile in (None, Tile(16, 16, 16, 4, 2), Tile(32, 32, 64, 4, 2, False)):
        other = again(problem)
        mapper.apply(other.source, other.target, other.strip, other.rotate, tile=tile)
        check(other, rounded=None)
        if tile is None:
            assert torch.equal(first.target.keys[1].nan_to_num(3), other.target.keys[1].nan_to_num(3))


def test_slots_beyond_two_to_the_31_elements():
    """A pool seen through a base address far below it: only 64-bit arithmetic lands inside."""
    problem = make_problem(Case(tokens=5, k=1, source=(1, 1, 32), target=(1, 1, 32), scattered=False))
    mapper = applier(problem, torch.float32)
    far = (1 << 31) // 32 + 11  # slots of 32 elements
    slots = torch.arange(5) + far
    source = replace(problem.source, slots=slots)
    target = replace(problem.target, slots=slots)
    for rows in (source, target):
        # The kernels see addresses only: the real rows, moved down by as much as the slots are up.
        mapper._addresses(rows).sub_(far * 32 * 4)
    mapper.apply(source, target, problem.strip, problem.rotate)
    check(problem, rounded=None)


def mapped_at(size, dtype):
    """`size` elements 2^32 bytes into a space of 15 GB, of which only pages in use take memory.

    What is addressed too low by up to 2^32 bytes meets zeros, not a fault.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    space = mmap.mmap(-1, 7 << 31, flags=flags)
    return space, torch.frombuffer(space, dtype=dtype, count=size, offset=1 << 32)


def test_weights_beyond_two_to_the_31_elements():
    """The one target layer stands as the 33,000th: its matrices begin 2.16e9 elements in."""
    layer = 33000
    case = Case(tokens=3, k=4, source=(4, 2, 64), target=(1, 1, 64), weights="int8")
    problem = make_problem(case)
    mapper = applier(problem, torch.float32)
    packed, one = mapper.packed, problem.plan.depth * problem.plan.columns
    assert 2 * layer * one > 1 << 31
    space, low = mapped_at(1, torch.int8)
    start = (1 << 32) + 2 * layer * one
    torch.frombuffer(space, dtype=torch.int8, count=2 * one, offset=start).copy_(packed.matrix.flatten())

    def moved(table):
        far = torch.zeros((layer + 1, *table.shape[1:]), dtype=table.dtype)
        far[layer] = table[0]
        return far

    mapper.packed = replace(packed, matrix=low, bias=moved(packed.bias), scale=moved(packed.scale))
    mapper._words, mapper._places = moved(mapper._words), moved(mapper._places[None])
    mapper._layers[0,] = torch.tensor([layer], dtype=torch.int32)
    key = tuple(rows.data_ptr() for rows in (problem.target.keys[0], problem.target.values[0]))
    mapper._known[key] = moved(mapper._addresses(problem.target).view(1, 2))
    mapper.apply(problem.source, problem.target, problem.strip, problem.rotate)
    check(problem, rounded=None)


@pytest.mark.parametrize("k, capacity", [(1, 67_200_000), (2, 23_000_000), (33, 1_040_000)])
def test_scratch_beyond_two_to_the_31_elements(k, capacity, monkeypatch):
    """The last plane of content rows begins 2.2e9 elements in: alone, of a few, of more than fit in words."""
    problem = make_problem(Case(tokens=3, k=k, source=(k, 1, 32), target=(1, 1, 32), rows=bf16, pool=bf16))
    mapper = applier(problem, bf16)
    shape = (2, k, capacity, 32)
    assert (2 * k - 1) * capacity * 32 > 1 << 31
    _space, low = mapped_at(32, bf16)
    take = mapper.workspace.take

    def far(name, size, dtype):
        return low.as_strided(shape, (0, 0, 0, 1)) if name == "x" else take(name, size, dtype)

    monkeypatch.setattr(mapper, "_scratch", lambda source: shape)
    monkeypatch.setattr(mapper.workspace, "take", far)
    mapper.apply(problem.source, problem.target, problem.strip, problem.rotate)
    check(problem, rounded=bf16, tolerance=8e-3)


def test_what_a_captured_graph_points_to_is_kept(monkeypatch):
    from kvhub_kernels import gpu

    problem = make_problem(Case(tokens=5, k=1, source=(1, 1, 32), target=(1, 1, 32)))
    mapper = applier(problem, torch.float32)
    call = problem.source, problem.target, problem.strip, problem.rotate
    short = replace(problem.source, tokens=3), *call[1:]
    monkeypatch.setattr(gpu, "capturing", lambda device: True)
    with pytest.raises(ValueError, match="before a capture"):
        mapper.apply(*call)
    monkeypatch.setattr(gpu, "capturing", lambda device: False)
    mapper.apply(*call)
    monkeypatch.setattr(gpu, "capturing", lambda device: True)
    mapper.apply(*short)
    tables = [mapper._addresses(rows) for rows in call[:2]]
    scratch = mapper.workspace.held("x", torch.float32)
    longer = replace(problem.source, tokens=300, slots=problem.source.slots.repeat(60))
    with pytest.raises(ValueError, match="as many tokens"):
        cos, sin = (part.repeat(60, 1) for part in (problem.strip.cos, problem.strip.sin))
        table = replace(problem.strip, cos=cos, sin=sin)
        more = problem.target.slots.repeat(60)
        mapper.apply(longer, replace(problem.target, tokens=300, slots=more), table, table)
    monkeypatch.setattr(gpu, "capturing", lambda device: False)
    monkeypatch.setattr(gpu, "_KEPT_TABLES", 1)
    other = again(problem)
    mapper.apply(problem.source, other.target, problem.strip, problem.rotate)
    mapper.workspace.take("x", (10 * scratch.numel(),), torch.float32)
    kept = [id(part) for part in mapper._captured.values()]
    assert all(id(part) in kept for part in (*tables, scratch))
    assert not any(tables[0] is known for known in mapper._known.values())


@pytest.mark.parametrize("index", range(len(EXTRAS)))
def test_what_the_gpu_script_checks_beyond_equal_sides(index):
    """Smaller, and in float32, whose products are exact here."""
    shape = EXTRAS[index]
    heads, many = min(shape["heads"], 2), shape["target_heads"]
    small = {"tokens": 18, "k": 1, "dtype": "float32", "heads": heads, "target_heads": many and min(many, 3)}
    assert gpu_check(shape | small, device="cpu")["good"]


@pytest.mark.parametrize("call", list(wrong_calls()), ids=lambda call: call[0])
def test_what_cannot_be_applied_is_refused_before_anything_is_written(call):
    _, arguments, options = call
    mapper = applier(make_problem(Case(tokens=9, k=2)), torch.float32)
    with pytest.raises(ValueError):
        mapper.apply(*arguments, **options)
    assert all(layer.isnan().all() for layer in (*arguments[1].keys, *arguments[1].values))


@pytest.mark.parametrize("side", ["source", "target"])
def test_values_of_another_stride(side):
    problem = make_problem(Case(tokens=9, k=2))
    rows = getattr(problem, side)
    spread = [layer.repeat(1, 2, 1)[:, :2] for layer in rows.values]
    setattr(problem, side, replace(rows, values=spread))
    with pytest.raises(ValueError, match="stride"):
        applier(problem, torch.float32).apply(problem.source, problem.target, problem.strip, problem.rotate)
