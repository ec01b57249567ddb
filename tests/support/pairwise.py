"""Small cases for the kernels in which every value of a form meets every value of every other form."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from support.applying import Case

LAYERS = 3
FORMS: dict[str, tuple[Any, ...]] = {
    "support": ("full", "head-local"),
    "k": (1, 2, LAYERS),
    "heads": (2, 1, 3),
    "dims": ((32, 32), (32, 16), (16, 48)),
    "strip": ("half", "interleaved"),
    "turn": ("half", "interleaved"),
    "strip_part": (1.0, 0.5),
    "turn_part": (1.0, 0.5),
    "scale": ((1.0, 1.0), (1.4, 0.6)),
    "rows": (torch.float32, torch.bfloat16, torch.float16),
    "weights": ("float32", "bfloat16", "int8"),
    "pool": (torch.float32, torch.bfloat16, torch.float16),
    "scattered": (True, False),
    "normalised": (True, False),
}
"""heads: of the target, where the source has two; head-local support needs as many on both sides."""


def possible(form: dict[str, Any]) -> bool:
    """Whether there is such a mapper."""
    return form.get("support") != "head-local" or form.get("heads", 2) == 2


def pairs(form: dict[str, Any]) -> set[tuple[Any, ...]]:
    """Every two values that meet in a form."""
    return set(itertools.combinations(sorted(form.items(), key=lambda item: item[0]), 2))


def wanted() -> set[tuple[Any, ...]]:
    """Every two values that can meet."""
    two = itertools.combinations(sorted(FORMS), 2)
    meetings = ((a, x, b, y) for a, b in two for x in FORMS[a] for y in FORMS[b])
    return {((a, x), (b, y)) for a, x, b, y in meetings if possible({a: x, b: y})}


def cover() -> dict[str, Case]:
    """Few cases that have all of `wanted`, the same each time: the best of many random forms, repeated."""
    chance, missing, cases = random.Random(0), wanted(), dict[str, Case]()
    while missing:
        must = dict(min(missing, key=repr))
        drawn = [{name: chance.choice(values) for name, values in FORMS.items()} | must for _ in range(200)]
        best = max((form for form in drawn if possible(form)), key=lambda form: len(pairs(form) & missing))
        missing -= pairs(best)
        cases[f"pairs {len(cases)}"] = case(best, tokens=(1, 7, 18)[len(cases) % 3], seed=len(cases))
    return cases


def case(form: dict[str, Any], *, tokens: int, seed: int) -> Case:
    """The form with two target layers."""
    dim, target_dim = form["dims"]
    return Case(
        form["support"],
        tokens,
        form["k"],
        (LAYERS, 2, dim),
        (2, form["heads"], target_dim),
        (form["strip"], form["turn"]),
        (form["strip_part"], form["turn_part"]),
        form["scale"],
        form["rows"],
        form["weights"],
        form["pool"],
        form["scattered"],
        form["normalised"],
        seed,
    )
