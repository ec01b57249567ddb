"""How long a fit will take: the first windows are timed, the solves are counted."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kvhub.fit.accumulate import Progress
from kvhub.fit.calibration import TUNING, tail_of
from kvhub.fit.distill.schedule import Distill
from kvhub.fit.mlp import MlpSettings, parameters, training_rate
from kvhub.fit.recipes.search import OFF_HEAD
from kvhub.fit.settings import GRID_LAMBDA, FitSettings
from kvhub.model.identity import Geometry

_FIRST = 3
"""Windows after which there is an estimate; the very first one pays for warming up."""


def solve_flops(source: Geometry, target: Geometry, settings: FitSettings) -> float:
    """Of one direction: Cholesky factors and triangular solves of K and V, for everything that is tried."""
    total = 0.0
    for k in _tried(source, settings):
        blocks = 1 if settings.support == "full" else target.num_kv_heads
        width, out = settings.width(source, k), target.features / blocks
        factors = 1 if k == source.num_layers else target.num_layers
        total += 2 * blocks * (factors * width**3 / 3 + target.num_layers * 2 * width**2 * out)
    if settings.recipe == "best" and settings.support == "full":  # a system for each head of the target
        width = settings.features(source)
        each = width**3 / 3 + 2 * width**2 * target.head_dim
        total += 2 * min(len(OFF_HEAD), settings.tries) * target.num_layers * target.num_kv_heads * each
    return total


def _tried(source: Geometry, settings: FitSettings) -> list[int]:
    """k of every candidate, at most; the one that is kept is solved again."""
    grid = settings.grid(source)
    if settings.recipe == "best":
        return grid * (settings.tries + 1)
    again = grid[-1:] if settings.automatic else []
    return [*grid, *again * (len(GRID_LAMBDA) if settings.regularization == "auto" else 1)]


def choice_windows(source: Geometry, target: Geometry, settings: FitSettings, *, both: bool) -> float:
    """What measuring candidates costs, in windows of both models: tails of the target, and once all of it."""
    shapes = (source, target)[: 1 + both]
    tried = sum(len(_tried(shape, settings)) - 1 for shape in shapes)
    return TUNING * (tried * tail_of(settings.longest) / settings.longest + len(shapes)) if tried else 0.0


def solve_seconds(source: Geometry, target: Geometry, settings: FitSettings, *, both: bool) -> float:
    """Time of all solves, from the speed of a small one here and now."""
    gram = torch.eye(512, dtype=torch.float64) * 2
    gram @ gram
    began = time.perf_counter()
    gram @ torch.linalg.cholesky(gram)
    rate = (512**3 / 3 + 2 * 512**3) / max(time.perf_counter() - began, 1e-6)
    pairs = ((source, target), (target, source))[: 1 + both]
    return sum(solve_flops(*pair, settings) for pair in pairs) / rate


def distil_windows(settings: FitSettings, *, both: bool) -> float:
    """What the distillation costs, in windows of both models: tails forwards, backwards and once natively.

    An upper bound where the source is not much the smaller of the two.
    """
    how = settings.train
    if not isinstance(how, Distill):
        return 0.0
    tail = min(how.tail, settings.longest // 4)
    passes = 4 * how.steps * how.batch + (how.checks + 1) * TUNING
    return (1 + both) * passes * tail / settings.longest


def train_seconds(
    source: Geometry, target: Geometry, settings: FitSettings, rows: int, *, both: bool
) -> float:
    """Time of training networks on `rows` rows, from the speed of small ones here and now."""
    how = settings.train
    if not isinstance(how, MlpSettings):
        return 0.0
    pairs = ((source, target), (target, source))[: 1 + both]
    shapes = [(two.num_layers, settings.networks(one, two)) for one, two in pairs]
    numbers = sum(2 * layers * parameters(how, *shape) for layers, shape in shapes)
    return 6 * how.epochs * rows * numbers / training_rate(how)


class Expected:
    """A `Progress` that passes everything on, and says once how long the fit will take."""

    def __init__(
        self,
        progress: Progress,
        say: Callable[[str], None],
        solving: float,
        choosing: float = 0.0,
        distilling: float = 0.0,
        training: float = 0.0,
    ) -> None:
        """solving, training (networks): seconds; choosing, distilling: as many windows."""
        self._progress = progress
        self._say = say
        self._solving = solving
        self._choosing = choosing
        self._distilling = distilling
        self._training = training
        self._began: tuple[str, int, float] | None = None
        self._told = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._progress(stage, done, total)
        if self._told or stage not in ("capture", "source"):
            return
        if self._began is None:
            if done:
                self._began = stage, done, time.monotonic()
            return
        first, start, began = self._began
        if stage == first and done - start >= _FIRST - 1:
            self._told = True
            each = (time.monotonic() - began) / (done - start)
            windows = each * (total - done)
            choose = f", {duration(each * self._choosing)} to choose" if self._choosing else ""
            distil = f", {duration(each * self._distilling)} to distil" if self._distilling else ""
            train = f", {duration(self._training)} to train networks" if self._training else ""
            both = " of the source, and the target's as long again or more" if stage == "source" else ""
            self._say(
                f"expected: {duration(windows)} for {total - done} more windows{both},"
                f" about {duration(self._solving)} to solve{choose}{distil}{train}"
            )


def duration(seconds: float) -> str:
    """For people: `40 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
