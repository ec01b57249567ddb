"""Recipes that are compared: what each changes of a fit, and what applying its mapper costs."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvhub.errors import BadInput
from kvhub.fit.distill.run import distil
from kvhub.fit.distill.schedule import Distill
from kvhub.fit.recipes.first import LOOK, settled
from kvhub.fit.recipes.groupwise import solve_groupwise
from kvhub.fit.recipes.normalise import normalises, norms_for
from kvhub.fit.ridge import PAPER, Regularization, Support
from kvhub.fit.run import demand_possible
from kvhub.fit.selection import layer_scores, top_layers
from kvhub.fit.settings import FitSettings
from kvhub.fit.solve import Solved
from kvhub.fit.study import choose_recipe
from kvhub.model.identity import Geometry
from kvhub.study.pair import StudyPair

K = int | Literal["all", "same", "half", "double"]
"""Source layers: a number, all, or relative to the comparison's own k."""


@dataclass(frozen=True)
class Recipe:
    """One way to fit; what is not said is as in the comparison's settings."""

    name: str
    k: K = "same"
    regularization: Regularization = Regularization()  # noqa: RUF009 - frozen
    support: Support = "full"
    stride: int | None = None
    first_weight: int = 1
    """How many times the row of the first position counts; 0: as its keys ask for."""
    exact_prefix: int = 0
    """Positions that are left out of the fit and native in use."""
    off_head: float = 1.0
    """Penalty of source heads that are not the matched one, relative to its own."""
    stretch_keys: float = 0.0
    stretch_values: float = 0.0
    normalise: Literal["auto", "on", "off"] = "off"
    """Keys through the target's k_norm; auto: where it has one, and else stretched."""
    steps: int = 0
    """Gradient steps through the target after the closed form, folded into the same matrices."""
    search: bool = False
    """Whether the closed form is searched for on the tuning windows, as `kvhub fit --recipe best` does."""

    def count(self, k: int | Literal["all"], source: Geometry) -> int:
        """How many source layers, where the comparison's own k is `k`."""
        every = source.num_layers
        same = every if k == "all" else k
        known = {"all": every, "same": same, "half": max(1, same // 2), "double": 2 * same}
        return min(known[self.k] if isinstance(self.k, str) else self.k, every)


RECIPES = (
    Recipe("paper", regularization=PAPER),
    Recipe("paper-k1", k=1, regularization=PAPER),
    Recipe("paper-all", k="all", regularization=PAPER),
    Recipe("ridge"),
    Recipe("ridge-1e-4", regularization=Regularization(1e-4)),
    Recipe("ridge-all", k="all"),
    Recipe("every-token", stride=1),
    Recipe("head-local", k="double", support="head-local"),
    Recipe("off-head-10", off_head=10.0),
    Recipe("first-row-x64", first_weight=64),
    Recipe("stretched-keys", stretch_keys=0.5),
    Recipe("stretched", stretch_keys=0.5, stretch_values=0.5),
    Recipe("first-4-exact", exact_prefix=4),
    Recipe("first-64-exact", exact_prefix=64),
    Recipe("closed-form", stride=1, first_weight=0, stretch_keys=0.5, stretch_values=0.5),
    Recipe("normalised", stride=1, first_weight=0, stretch_values=0.5, normalise="on"),
    Recipe("ridge-distilled", steps=60),
    Recipe("default-stretched", stride=1, first_weight=0, stretch_keys=0.5, stretch_values=0.5, steps=60),
    Recipe(
        "default", stride=1, first_weight=0, stretch_keys=0.5, stretch_values=0.5, normalise="auto", steps=60
    ),
)
"""Each alone, then together; the paper's lambda first, because shares of what is removed are of its excess.
`default` is what `kvhub fit` does unasked, `default-stretched` the same with `--normalise-keys off`: they are
one where the target has no k_norm."""


MORE = (
    Recipe("every-token-all", k="all", stride=1),
    Recipe("every-token-paper-all", k="all", stride=1, regularization=PAPER),
    Recipe("first-row-x64-all", k="all", first_weight=64),
    Recipe("first-row-x64-paper-all", k="all", first_weight=64, regularization=PAPER),
    Recipe("ridge-k12-1e-4", k=12, regularization=Regularization(1e-4)),
    Recipe("first-4-exact-all", k="all", exact_prefix=4),
    Recipe("first-4-exact-paper-all", k="all", exact_prefix=4, regularization=PAPER),
    Recipe("first-64-exact-all", k="all", exact_prefix=64),
    Recipe("best", stride=1, first_weight=0, normalise="auto", steps=60, search=True),
)
"""Compared only where they are asked for by name: they cost more, to apply (more layers) or to fit."""


def named(name: str) -> Recipe:
    """Errors: `BadInput` for a name that is none."""
    known = {recipe.name: recipe for recipe in (*RECIPES, *MORE)}
    if name not in known:
        raise BadInput(f"{name} is no recipe", f"one of {', '.join(known)}")
    return known[name]


def fit(pair: StudyPair, recipe: Recipe) -> tuple[Solved, float]:
    """A mapper by `recipe` from the pair's captures, and the seconds that it took, without moments.

    Errors: `Incompatible` for head-local with unequal heads; those of `solve_pair` and `distil`.
    """
    shapes = pair.source.identity.geometry, pair.target.identity.geometry
    assert pair.settings.k != "auto"
    k = recipe.count(pair.settings.k, shapes[0])
    settings = replace(
        pair.settings,
        k=k,
        support=recipe.support,
        stretch=recipe.stretch_keys,
        stretch_values=recipe.stretch_values,
        normalise_keys=recipe.normalise,
    )
    demand_possible(*shapes, settings, both=False)
    sides = pair.side(pair.source), pair.side(pair.target)
    normalises(settings, pair.target.identity)
    weight = settled(replace(settings, first_weight=recipe.first_weight), sides, pair.windows()[:LOOK])
    moments = pair.moments(
        stride=recipe.stride, exact_prefix=recipe.exact_prefix, first_weight=weight.first_weight
    )
    began = time.perf_counter()
    norms = norms_for(sides[1], settings, pair.windows()[0])
    if recipe.search:
        scores, tuning = layer_scores(moments, *shapes), _tuning(pair)
        known = replace(settings, regularization=recipe.regularization, exact_prefix=recipe.exact_prefix)
        solved, _ = choose_recipe(moments, scores, *sides, tuning, known, norms)
    elif recipe.off_head == 1.0:
        solved = pair.solve(moments, k, recipe.regularization, settings=settings, norms=norms)
    else:
        layers = top_layers(layer_scores(moments, *shapes), k)
        solved = solve_groupwise(
            moments, *shapes, layers, recipe.regularization, settings, norms, factor=recipe.off_head
        )  # fmt: skip
    if recipe.steps:
        solved = _distilled(pair, solved, recipe, replace(settings, exact_prefix=recipe.exact_prefix))
    return solved, time.perf_counter() - began


def _distilled(pair: StudyPair, solved: Solved, recipe: Recipe, settings: FitSettings) -> Solved:
    """`solved` after the recipe's gradient steps; the pair's tuning windows choose among their checks."""
    sides = pair.side(pair.source), pair.side(pair.target)
    known = replace(settings, support=solved.support or settings.support, k=len(solved.layers[0]))
    return distil(solved, *sides, pair.mixed(), list(_tuning(pair)), known, Distill(steps=recipe.steps))


def _tuning(pair: StudyPair) -> Tensor:
    """Windows to choose on, `[n, length]`."""
    return torch.cat(list(pair.text.tuning.values())) if pair.text.tuning else torch.empty(0, 0).long()


def apply_flops(solved: Solved) -> int:
    """Multiplications and additions for one token, both sides, without the rotations."""
    return sum(2 * t.numel() for name, t in solved.tensors.items() if name.endswith(".weight"))


def stored_bytes(solved: Solved) -> int:
    """Of all tensors, as stored."""
    return sum(t.numel() * t.element_size() for t in solved.tensors.values())
