"""`--k auto`, `--lambda auto`: every candidate from the same moments, judged by what the target does with it.

Training R2 only grows with k, and R2 does not show what regularisation of the keys does at all; so neither
is used. Each candidate maps the source's cache of tuning windows, which are neither fitted on nor held
out, and the target goes on from it: attention-output cosine and KL decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvhub.artifact.manifest import CurvePoint, Selection
from kvhub.errors import BadInput, KvhubError
from kvhub.evaluation.inject import KvRows, run
from kvhub.evaluation.metrics import attention_cosines, compare_logits
from kvhub.evaluation.probe import QueryProbe
from kvhub.fit.accumulate import Progress
from kvhub.fit.calibration import tail_of
from kvhub.fit.capture import Capture
from kvhub.fit.moments import PairMoments
from kvhub.fit.recipes.choice import Choice, solve_choice
from kvhub.fit.recipes.search import search
from kvhub.fit.ridge import Regularization
from kvhub.fit.score import apply_ridge
from kvhub.fit.selection import top_layers
from kvhub.fit.settings import GRID_LAMBDA, FitSettings
from kvhub.fit.side import Side
from kvhub.fit.solve import Solved, solve_pair
from kvhub.fit.text import token_digest
from kvhub.model.identity import within_bounds
from kvhub.model.placement import input_device
from kvhub.model.rope import rotary_table
from kvhub_kernels.rotary import apply_rope

if TYPE_CHECKING:
    from kvhub.model.load import LoadedModel

NEAR = 0.01
"""A smaller k wins where its KL is within this share of the best one: every layer costs time for ever."""
NEAR_COSINE = 0.002


@dataclass(frozen=True)
class _Window:
    """What all candidates share of one tuning window."""

    source: Capture
    native: KvRows
    logits: Tensor
    tail: Tensor
    labels: Tensor
    probe: QueryProbe


def choose(
    moments: PairMoments,
    scores: Tensor,
    source: Side,
    target: Side,
    windows: Tensor,
    settings: FitSettings,
    norms: Tensor | None,
    tell: Progress,
) -> Selection:
    """k, then lambda, each by its curve on `windows` (`[n, length]`). norms: of `norms_for`.

    Candidates that have fewer rows than features, or whose Gram is not positive definite, are left out.
    Errors: `BadInput` where the windows are too short or no candidate is left.
    """
    tail = _tail(windows, settings)
    shapes = source.identity.geometry, target.identity.geometry
    grid = [k for k in settings.grid(shapes[0]) if settings.width(shapes[0], k) < moments.key.n]
    strengths = (
        [Regularization(value) for value in GRID_LAMBDA]
        if settings.regularization == "auto"
        else [settings.regularization]
    )
    first = Regularization() if settings.regularization == "auto" else settings.regularization
    total = len(grid) + len(strengths) - 1
    curve: list[CurvePoint] = []
    with target.live() as model:
        held = [_window(source, model, window, tail) for window in windows]

        def measure(k: int, strength: Regularization) -> None:
            try:
                solved = solve_pair(moments, *shapes, top_layers(scores, k), strength, settings, norms)
            except KvhubError:
                return
            finally:
                tell("choose", min(len(curve) + 1, total), total)
            curve.append(_measure(solved, held, model, settings.exact_prefix))

        tell("choose", 0, total)
        for k in grid:
            measure(k, first)
        if not curve:
            raise BadInput("no k gives a positive definite system", "give more text, or a larger --lambda")
        best = smallest(curve)
        for strength in strengths:
            if strength != first:
                measure(best.k, strength)
    same_k = [point for point in curve if point.k == best.k]
    chosen = min(same_k, key=lambda point: (point.kl, -point.attention_cosine))
    return Selection(
        k=chosen.k,
        regularization=chosen.regularization,
        windows=len(windows),
        tail=tail,
        digest=token_digest([windows]),
        curve=curve,
    )


def choose_recipe(
    moments: PairMoments,
    scores: Tensor,
    source: Side,
    target: Side,
    windows: Tensor,
    settings: FitSettings,
    norms: Tensor | None,
    tell: Progress = lambda stage, done, total: None,
) -> tuple[Solved, Selection]:
    """`--recipe best`: `kvhub.fit.recipes.search` on `windows` (`[n, length]`), and every candidate's scores.

    norms: of `norms_for`.
    Errors: `BadInput` where the windows are too short; `KvhubError` where no candidate can be solved.
    """
    tail = _tail(windows, settings)
    shapes = source.identity.geometry, target.identity.geometry
    assert settings.regularization != "auto"
    start = Choice(
        settings.grid(shapes[0])[0],
        settings.regularization,
        settings.support,
        normalise=settings.normalise_keys == "on",
    )
    done, tries = 0, settings.tries
    with target.live() as model:
        held = [_window(source, model, window, tail) for window in windows]

        def measure(choice: Choice) -> CurvePoint:
            nonlocal done
            done += 1
            tell("choose", min(done, tries), tries)
            solved = solve_choice(choice, moments, scores, *shapes, settings, norms)
            point = _measure(solved, held, model, settings.exact_prefix)
            return point.model_copy(update={"recipe": choice.label()})

        tell("choose", 0, tries)
        best, curve = search(start, *shapes, measure, tries=tries, normalise=norms is not None)
    tell("choose", tries, tries)
    selection = Selection(
        k=best.k,
        regularization=best.regularization.value,
        windows=len(windows),
        tail=tail,
        digest=token_digest([windows]),
        curve=curve,
    )
    return solve_choice(best, moments, scores, *shapes, settings, norms), selection


def _tail(windows: Tensor, settings: FitSettings) -> int:
    """Tokens that the target runs. Errors: `BadInput` where the windows are too short."""
    if not len(windows):
        raise BadInput("there are no windows to choose on", "give more text")
    length = windows.shape[1]
    tail = tail_of(length)
    if tail < 2 or length - tail <= settings.exact_prefix:
        raise BadInput("choosing needs longer windows", "use a longer --length")
    return tail


def smallest(curve: Sequence[CurvePoint]) -> CurvePoint:
    """The point of the smallest k that is as good as the best one by KL, and no worse by cosine."""
    best = min(curve, key=lambda point: (point.kl, point.k))
    near = (
        point
        for point in curve
        if point.kl <= (1 + NEAR) * best.kl and point.attention_cosine >= best.attention_cosine - NEAR_COSINE
    )
    return min(near, key=lambda point: point.k)


def _window(source: Side, target: LoadedModel, window: Tensor, tail: int) -> _Window:
    split = len(window) - tail
    with QueryProbe(target.model, tail - 1) as probe:
        logits, cache = run(target.model, window[:-1], keep=tail - 1)
    return _Window(
        source=_first(source.capture(window), split),
        native=KvRows.of(cache, split),
        logits=logits,
        tail=window[split:-1],
        labels=window[split + 1 :],
        probe=probe,
    )


def _first(capture: Capture, count: int) -> Capture:
    """The rows before `count`: no row of a causal model depends on later tokens."""

    def cut(rows: list[Tensor]) -> list[Tensor]:
        return [layer[:count].clone() for layer in rows]

    return Capture(cut(capture.content_keys), [], cut(capture.values))


def _measure(solved: Solved, held: Sequence[_Window], target: LoadedModel, exact: int) -> CurvePoint:
    kl = top1 = positions = 0.0
    cosines = []
    for window in held:
        mapped = mapped_rows(solved, window.source, target).with_exact_prefix(window.native, exact)
        logits, _ = run(target.model, window.tail, start=len(window.native), rows=mapped)
        sums = compare_logits(window.logits, logits, window.labels)
        kl, top1, positions = kl + sums.kl, top1 + sums.top1, positions + len(window.labels)
        found = attention_cosines(window.probe.queries, window.probe.scaling, window.native, mapped)
        cosines.append(found.mean(1))
    layers = np.asarray(cosines).mean(0)
    return CurvePoint(
        k=len(solved.layers[0]),
        regularization=solved.regularization.value,
        attention_cosine=float(layers.mean()),
        attention_cosine_worst=float(layers.min()),
        kl=within_bounds(kl / positions),
        top1=top1 / positions,
    )


def mapped_rows(solved: Solved, source: Capture, target: LoadedModel) -> KvRows:
    """The target's cache by a mapper that is not written yet, from a capture at positions 0, 1, 2, ..."""
    device, dtype = input_device(target.model), target.model.dtype
    table = rotary_table(target.identity.rope, torch.arange(len(source.values[0]), device=device))
    keys: list[Tensor] = []
    values: list[Tensor] = []
    with torch.inference_mode():
        for number, layers in enumerate(solved.layers):
            for name, rows, found in (("k", source.content_keys, keys), ("v", source.values, values)):
                x = torch.stack([rows[layer].to(device, torch.float32) for layer in layers], dim=1)
                y = apply_ridge(solved.tensors, f"layers.{number}.{name}", x)
                found.append((apply_rope(y, table) if name == "k" else y).to(dtype))
    return KvRows(tuple(keys), tuple(values))
