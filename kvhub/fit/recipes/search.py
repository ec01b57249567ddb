"""`--recipe best`: one axis after the other, judged by what the target does with the mapped cache.

Every candidate comes from the same moments and costs no more to apply than the one asked for. The order is
fixed and the budget is a number of candidates, not of seconds: the same input gives the same mapper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from kvhub.artifact.manifest import CurvePoint
from kvhub.errors import KvhubError
from kvhub.fit.recipes.choice import Choice
from kvhub.fit.ridge import Regularization
from kvhub.model.identity import Geometry

LAMBDAS = (1e-4, 3e-4, 3e-3, 1e-2)
OFF_HEAD = (10.0, 100.0)
STRETCH = (0.25, 0.5)
BETTER = 0.002
"""A candidate replaces a simpler one where its KL is lower by this share."""

Measure = Callable[[Choice], CurvePoint]


def search(
    start: Choice,
    source: Geometry,
    target: Geometry,
    measure: Measure,
    *,
    tries: int,
    normalise: bool = False,
) -> tuple[Choice, list[CurvePoint]]:
    """The best candidate by KL, and every one that was tried, in order.

    normalise: whether keys may go through the target's k_norm, where `start` does not say that they do.
    Candidates whose system is singular are left out. Errors: `KvhubError` where none is left.
    """
    limit = start.flops(source, target)
    tried: dict[Choice, CurvePoint] = {}
    failed: set[Choice] = set()
    why: KvhubError | None = None

    def ask(choice: Choice) -> CurvePoint | None:
        nonlocal why
        if choice in tried or choice in failed or len(tried) >= tries:
            return tried.get(choice)
        try:
            tried[choice] = measure(choice)
        except KvhubError as error:
            failed.add(choice)
            why = error
        return tried.get(choice)

    best = start if ask(start) else None
    norms = (_norms,) if normalise and target.k_norm else ()
    for axis in (_supports, *norms, _lambdas, _heads, _keys, _values):
        for choice in axis(best or start, source, target):
            point = ask(choice) if choice.flops(source, target) <= limit else None
            if point and (best is None or point.kl < (1 - BETTER) * tried[best].kl):
                best = choice
    if best is None:
        assert why is not None
        raise why
    return best, list(tried.values())


def _supports(at: Choice, source: Geometry, target: Geometry) -> Iterator[Choice]:
    """More layers for fewer heads, at the same cost."""
    if source.num_kv_heads == target.num_kv_heads and at.support == "full":
        k = min(at.k * source.num_kv_heads, source.num_layers)
        yield replace(at, support="head-local", k=k)


def _norms(at: Choice, source: Geometry, target: Geometry) -> Iterator[Choice]:
    if not at.normalise:
        yield replace(at, normalise=True)


def _lambdas(at: Choice, source: Geometry, target: Geometry) -> Iterator[Choice]:
    for value in LAMBDAS:
        yield replace(at, regularization=Regularization(value))


def _heads(at: Choice, source: Geometry, target: Geometry) -> Iterator[Choice]:
    if at.support == "full" and source.num_kv_heads > 1:
        for factor in OFF_HEAD:
            yield replace(at, off_head=factor)


def _keys(at: Choice, source: Geometry, target: Geometry) -> Iterator[Choice]:
    if at.support == "full" and not at.normalise:  # the norm gives lengths back
        for share in STRETCH:
            yield replace(at, stretch_keys=share)


def _values(at: Choice, source: Geometry, target: Geometry) -> Iterator[Choice]:
    if at.support == "full":
        for share in STRETCH:
            yield replace(at, stretch_values=share)
