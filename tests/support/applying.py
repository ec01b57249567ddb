"""Random mappers and caches for the kernels, and the one comparison that they are held to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvhub_kernels.plan import Plan
from kvhub_kernels.reference import map_layer_reference
from kvhub_kernels.rotary import RotaryTable
from kvhub_kernels.rows import Rows
from kvhub_kernels.weights import Weights

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class Case:
    """One mapper and one span of tokens; fields that matter to a kernel."""

    support: str = "full"
    tokens: int = 63
    k: int = 3
    source: tuple[int, int, int] = (8, 2, 64)
    """Layers, heads, dimension."""
    target: tuple[int, int, int] = (3, 2, 64)
    pairing: tuple[str, str] = ("half", "half")
    partial: tuple[float, float] = (1.0, 1.0)
    """The part of the head that is rotated, of the source and of the target."""
    scale: tuple[float, float] = (1.0, 1.0)
    rows: torch.dtype = torch.float32
    weights: str = "float32"
    pool: torch.dtype = torch.float32
    scattered: bool = True
    normalised: bool = False
    """Keys go through the target's k_norm."""
    seed: int = 0


@dataclass
class Problem:
    """A case made into tensors. The target's pool is NaN where nothing was written."""

    case: Case
    plan: Plan
    weights: Weights
    source: Rows
    target: Rows
    strip: RotaryTable
    rotate: RotaryTable
    unused: Tensor = field(repr=False)
    """Slots of the target that must stay untouched."""


def make_problem(case: Case) -> Problem:
    """Rows with an offset and a bias far larger than their spread, as real keys have."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    layers, heads, dim = case.source
    target_layers, target_heads, target_dim = case.target
    chosen = tuple(
        tuple(sorted(torch.randperm(layers, generator=generator)[: case.k].tolist()))
        for _ in range(target_layers)
    )
    plan = Plan(case.support, chosen, heads, dim, target_heads, target_dim)  # type: ignore[arg-type]
    shape = (plan.groups, plan.depth, plan.columns)
    stored = torch.float32 if case.weights in ("float32", "int8") else torch.bfloat16
    # Columns of unequal size where each has a scale of its own: another column's would be wrong.
    size = torch.linspace(0.25, 2, plan.columns) if case.weights == "int8" else torch.ones(())
    weights = Weights.of(
        plan,
        lambda layer, side: (
            ((torch.rand(shape, generator=generator) - 0.5) * (12 / plan.depth) ** 0.5 * size)
            .to(stored)
            .view(shape if plan.groups > 1 else shape[1:]),
            5 * normal(target_heads, target_dim),
        ),
        [0.2 + 2 * torch.rand(target_dim, generator=generator) for _ in chosen] if case.normalised else None,
    )
    if case.weights == "int8":
        weights = weights.quantized()
    slots, read = _slots(case, generator, repeated=True)
    offset = 3 * normal(heads, dim)
    source = Rows(
        [(normal(slots, heads, dim) + offset).to(case.rows) for _ in range(layers)],
        [normal(slots, heads, dim).to(case.rows) for _ in range(layers)],
        case.tokens,
        read,
    )
    slots, written = _slots(case, generator, repeated=False)
    pool = [
        torch.full((slots, target_heads, target_dim), float("nan"), dtype=case.pool)
        for _ in range(2 * target_layers)
    ]
    target = Rows(pool[:target_layers], pool[target_layers:], case.tokens, written)
    unused = torch.ones(slots, dtype=torch.bool)
    unused[written if written is not None else slice(0, case.tokens)] = False
    positions = torch.arange(case.tokens) * 3 + 5
    tables = [
        RotaryTable.build(
            10000.0 ** -torch.linspace(0, 0.9, int(size * part) // 2),
            positions,
            pairing=pairing,  # type: ignore[arg-type]
            scale=scale,
        )
        for size, part, pairing, scale in zip(
            (dim, target_dim), case.partial, case.pairing, case.scale, strict=True
        )
    ]
    return Problem(case, plan, weights, source, target, tables[0], tables[1], unused)


def _slots(case: Case, generator: torch.Generator, *, repeated: bool) -> tuple[int, Tensor | None]:
    """How many slots a pool has, and where the tokens lie in it."""
    if not case.scattered:
        return case.tokens + 2, None
    slots = 2 * case.tokens + 3
    chosen = torch.randperm(slots, generator=generator)[: case.tokens]
    if repeated:
        chosen[-1] = chosen[0]
    return slots, chosen


def check(
    problem: Problem,
    *,
    rounded: torch.dtype | None,
    layers: range | None = None,
    tolerance: float | None = None,
) -> None:
    """The pool holds what the definition says in every layer, and nothing else was touched."""
    tolerance = tolerance or max(TOLERANCE[problem.case.pool], TOLERANCE[rounded or torch.float32])
    target = problem.target
    where = slice(0, target.tokens) if target.slots is None else target.slots
    for layer in layers or range(problem.plan.layers):
        want = map_layer_reference(
            problem.weights, layer, problem.source, problem.strip, problem.rotate, rounded=rounded
        )
        for name, pool, truth in zip("kv", (target.keys[layer], target.values[layer]), want, strict=True):
            error = relative(pool[where], truth)
            assert error < tolerance, f"{problem.case}: {name} of layer {layer} off by {error:.2e}"
            assert pool[problem.unused].isnan().all(), f"{problem.case}: wrote outside its slots"


def relative(have: Tensor, truth: Tensor) -> float:
    """||have - truth|| / ||truth||, infinite where anything is not finite."""
    error = float((have.double() - truth).norm() / truth.norm())
    return error if error == error else float("inf")


def again(problem: Problem) -> Problem:
    """The same problem with a fresh pool."""
    pools = [
        [torch.full_like(layer, float("nan")) for layer in side]
        for side in (problem.target.keys, problem.target.values)
    ]
    return replace(problem, target=Rows(pools[0], pools[1], problem.target.tokens, problem.target.slots))


def wrong_calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """What no path may take, each as a name and arguments of `Applier.apply` for `Case(tokens=9, k=2)`."""
    p = make_problem(Case(tokens=9, k=2))
    source, target, strip, rotate = p.source, p.target, p.strip, p.rotate

    def cut(table: RotaryTable, rows: slice, width: slice = slice(None)) -> RotaryTable:
        return replace(table, cos=table.cos[rows, width], sin=table.sin[rows, width])

    def of(rows: Rows, change: Any) -> Rows:
        return replace(rows, keys=[change(x) for x in rows.keys], values=[change(x) for x in rows.values])

    def smaller(layer: Tensor) -> Tensor:
        return layer[..., :32].contiguous()

    few = slice(0, p.plan.used[-1])
    fewer = replace(source, keys=source.keys[few], values=source.values[few])
    wide = replace(strip, cos=strip.cos.repeat(1, 2), sin=strip.sin.repeat(1, 2))
    yield "another head size of the source", (of(source, smaller), target, strip, rotate), {}
    yield "another head size of the target", (source, of(target, smaller), strip, rotate), {}
    yield "fewer heads", (source, of(target, lambda x: x[:, :1].contiguous()), strip, rotate), {}
    yield "fewer tokens", (source, replace(target, tokens=8), strip, rotate), {}
    yield "a short table to strip", (source, target, cut(strip, slice(0, 8)), rotate), {}
    yield "a short table to rotate", (source, target, strip, cut(rotate, slice(0, 8))), {}
    yield "a table of one row", (source, target, cut(strip, slice(0, 1)), rotate), {}
    yield "more turned than there is", (source, target, wide, rotate), {}
    yield "fewer source layers", (fewer, target, strip, rotate), {}
    yield "no such layer", (source, target, strip, rotate), {"layers": [3]}
    yield "a layer before the first", (source, target, strip, rotate), {"layers": [-1]}
    meta = of(source, lambda layer: layer.to("meta"))
    assert source.slots is not None and target.slots is not None
    yield "the source elsewhere", (meta, target, strip, rotate), {}
    yield "its slots elsewhere", (replace(source, slots=source.slots.to("meta")), target, strip, rotate), {}
    yield (
        "slots to write elsewhere",
        (source, replace(target, slots=target.slots.to("meta")), strip, rotate),
        {},
    )
    yield "a table elsewhere", (source, target, strip, replace(rotate, cos=rotate.cos.to("meta"))), {}
    yield "float64 to read", (of(source, Tensor.double), target, strip, rotate), {}
    yield "float64 to write", (source, of(target, Tensor.double), strip, rotate), {}
