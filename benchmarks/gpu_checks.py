"""The shapes that `gpu_apply.py` holds against the definition, the order they come in, and the check of one.

All combinations of the tests would be some 670 kernels to compile. Here every two values of any two fields
are met together in the first few dozen shapes, each value in the first few; after those few come unequal
sides, repeated pages, k_norm and float16 pools (`EXTRAS`); later the shape of large models in every support,
length and dtype, and other combinations of the first kind.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from typing import Any

import torch

from benchmarks.shapes import make_rows, make_table, make_weights
from kvhub_kernels.gpu import TritonApplier
from kvhub_kernels.plan import Plan
from kvhub_kernels.reference import map_layer_reference
from kvhub_kernels.rotary import RotaryTable
from kvhub_kernels.rows import Rows
from kvhub_kernels.weights import Weights

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
Shape = dict[str, Any]
FIELDS: dict[str, tuple[Any, ...]] = {
    "support": ("full", "head-local"),
    "tokens": (1, 63, 1000),
    "k": (1, 3, 8, 9),
    "dim": (64, 80, 96, 128, 256),
    "heads": (1, 2, 3, 8),
    "dtype": ("bfloat16", "float32"),
    "pairing": ("half", "interleaved"),
    "partial": (1.0, 0.5),
    "page": (1, 16, 64),
    "int8": (False, True),
}
SQUARE: Shape = {"target_heads": None, "target_dim": None, "repeated": False, "norm": False, "pool": None}
"""Of every shape of `FIELDS`: equal sides (None), each page once, no k_norm, a pool like the products."""
_EXTRA: Shape = {
    "support": "full", "tokens": 333, "k": 3, "dim": 128, "heads": 8, "dtype": "bfloat16",
    "pairing": "half", "partial": 1.0, "page": 64, "int8": False,
}  # fmt: skip
EXTRAS: tuple[Shape, ...] = tuple(
    _EXTRA | SQUARE | change
    for change in (
        {"norm": True},
        {"heads": 2, "dim": 64, "target_heads": 2, "target_dim": 128, "page": 1},
        {"heads": 8, "dim": 64, "target_heads": 3, "target_dim": 96, "repeated": True, "page": 16},
        {"pool": "float16"},
        {"support": "head-local", "target_dim": 80, "repeated": True, "page": 1, "dtype": "float32"},
        {"support": "head-local", "norm": True, "int8": True, "target_dim": 64},
        {"support": "head-local", "pool": "float16", "norm": True, "dtype": "float32", "repeated": True},
        {"norm": True, "dtype": "float32", "heads": 3, "target_heads": 5, "target_dim": 80, "page": 16},
        {"heads": 1, "dim": 256, "target_heads": 8, "target_dim": 64, "int8": True, "pool": "float16"},
        {"norm": True, "pairing": "interleaved", "partial": 0.5, "tokens": 40, "repeated": True},
    )
)
"""Unequal sides, source pages that repeat, k_norm, a float16 pool; checked after the first few."""
FIRST = 16
"""Of `FIELDS`, before the extras: every value of a field is among them."""
COVERS, SEED, WORKERS = 3, 0, 12


def shapes() -> list[Shape]:
    """What is checked, in order; the same every time."""
    draw = random.Random(SEED)
    found = list(_covering(draw))
    for _ in range(COVERS - 1):
        found += _covering(draw)
    core = {"k": 8, "dim": 128, "heads": 8, "pairing": "half", "partial": 1.0, "page": 64, "int8": False}
    varied = ("support", "tokens", "dtype")
    first = len(found) // COVERS
    found[first:first] = [
        core | dict(zip(varied, values, strict=True))
        for values in itertools.product(*(FIELDS[name] for name in varied))
    ]
    unlike = {tuple(shape[name] for name in FIELDS): shape for shape in found}
    square = [{name: shape[name] for name in FIELDS} | SQUARE for shape in unlike.values()]
    return [*square[:FIRST], *EXTRAS, *square[FIRST:]]


def _covering(draw: random.Random) -> Iterator[Shape]:
    """Shapes until every pair of values was met; each is the best of some draws by new pairs."""
    names = list(itertools.combinations(FIELDS, 2))
    missing = {(a, x, b, y) for a, b in names for x in FIELDS[a] for y in FIELDS[b]}
    while missing:
        a, x, b, y = draw.choice(sorted(missing, key=str))
        tries = [
            {name: draw.choice(values) for name, values in FIELDS.items()} | {a: x, b: y} for _ in range(60)
        ]
        best = max(tries, key=lambda shape: len(_pairs(shape, names) & missing))
        missing -= _pairs(best, names)
        yield best


def _pairs(shape: Shape, names: list[tuple[str, str]]) -> set[tuple[str, Any, str, Any]]:
    return {(a, shape[a], b, shape[b]) for a, b in names}


def error_of(
    weights: Weights,
    dtype: torch.dtype,
    source: Rows,
    target: Rows,
    strip: RotaryTable,
    rotate: RotaryTable,
    layers: list[int],
) -> float:
    """Largest relative error over some layers; infinite where anything is not finite."""
    slots, worst = target.token_slots(), 0.0
    for layer in layers:
        want = map_layer_reference(weights, layer, source, strip, rotate, rounded=dtype)
        for pool, truth in zip((target.keys[layer], target.values[layer]), want, strict=True):
            error = float((pool[slots].double() - truth).norm() / truth.norm())
            worst = max(worst, error if error == error else float("inf"))
    return worst


def poisoned(
    layers: int, heads: int, dim: int, tokens: int, dtype: torch.dtype, page: int, device: str
) -> Rows:
    """Rows to be written, NaN before that."""
    rows = make_rows(layers, heads, dim, tokens, dtype, device, page=page)
    for layer in (*rows.keys, *rows.values):
        layer.fill_(float("nan"))
    return rows


def repeating(rows: Rows) -> Rows:
    """The same cache read through a table whose last page in use is its first."""
    assert rows.slots is not None
    slots = rows.slots.clone()
    slots[-(-rows.tokens // rows.page_size) - 1] = slots[0]
    return Rows(rows.keys, rows.values, rows.tokens, slots, rows.page_size)


def check(shape: Shape, device: str = "cuda") -> Shape:
    """One shape mapped twice and compared: the same fields, and what was found."""
    support, tokens, k, dim, heads = (shape[n] for n in ("support", "tokens", "k", "dim", "heads"))
    dtype, page = getattr(torch, shape["dtype"]), shape["page"]
    wide_target, many = shape["target_dim"] or dim, shape["target_heads"] or heads
    stored = getattr(torch, shape["pool"] or shape["dtype"])
    torch.manual_seed(0)
    try:
        chosen = tuple(tuple(range(t % 2, t % 2 + k)) for t in range(3))
        plan = Plan(support, chosen, heads, dim, many, wide_target)
        weights = make_weights(plan, dtype, device)
        weights = weights.quantized() if shape["int8"] else weights
        if shape["norm"]:
            weights = replace(weights, norms=0.2 + 2 * torch.rand(3, wide_target, device=device))
        source = make_rows(10, heads, dim, tokens, dtype, device, page=page)
        source = repeating(source) if shape["repeated"] else source
        target = poisoned(3, many, wide_target, tokens, stored, page, device)
        strip, table = (
            RotaryTable(made.cos * 1.2, made.sin * 1.2, shape["pairing"], 1.2)
            for made in (
                make_table(int(size * shape["partial"]) // 2 * 2, tokens, device)
                for size in (dim, wide_target)
            )
        )
        applier = TritonApplier(weights, table, device=device, dtype=dtype)
        finite = int(applier.apply(source, target, strip, table))
        error = error_of(weights, dtype, source, target, strip, table, [0, 1, 2])
        first = target.keys[2].clone()
        applier.apply(source, target, strip, table)
        same = torch.equal(first.nan_to_num(7), target.keys[2].nan_to_num(7))
    except Exception as failure:  # one shape that does not compile must not hide the others
        print(f"FAILED {shape}: {str(failure)[:300]}", flush=True)
        return shape | {"relative_error": "", "finite": "", "deterministic": "", "good": False}
    good = error < max(TOLERANCE[dtype], TOLERANCE[stored]) and finite == 1 and same
    found = {"relative_error": f"{error:.1e}", "finite": finite, "deterministic": same, "good": good}
    return shape | found


def checks(has_time: Callable[[], bool]) -> list[Shape]:
    """`shapes()` in order as far as time goes, by processes side by side, each with a compiler of its own."""
    left, found = iter(shapes()), []
    workers = max(1, min(WORKERS, (os.cpu_count() or 2) - 1))
    running: set[Future[Shape]] = set()
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        while has_time():
            running |= {pool.submit(check, shape) for shape in itertools.islice(left, workers - len(running))}
            if not running:
                break
            done, running = wait(running, timeout=1, return_when=FIRST_COMPLETED)
            found += [one.result() for one in done]
    except Exception as failure:  # a process that died takes the others with it
        print(f"FAILED after {len(found)} shapes: {str(failure)[:300]}", flush=True)
        found.append(shapes()[0] | {"relative_error": "", "finite": "", "deterministic": "", "good": False})
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return found
