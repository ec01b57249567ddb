"""Fit a pair of models: capture, moments, selection, ridge, held-out R2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import kvhub
from kvhub.artifact.manifest import NORMALISED, Manifest, Selection
from kvhub.errors import BadInput, Incompatible
from kvhub.fit.accumulate import Progress, accumulate, fill_captures, moments_device
from kvhub.fit.blocks import solve_in_blocks
from kvhub.fit.budget import moment_bytes
from kvhub.fit.calibration import CalibrationSet, row_positions
from kvhub.fit.checkpoint import Checkpoint
from kvhub.fit.memory import demand_memory, release
from kvhub.fit.moments import PairMoments
from kvhub.fit.recipes.first import LOOK, settled
from kvhub.fit.recipes.normalise import normalises, norms_for
from kvhub.fit.ridge import Regularization
from kvhub.fit.selection import layer_scores, top_layers
from kvhub.fit.settings import FitSettings
from kvhub.fit.side import Side
from kvhub.fit.solve import Solved, solve_pair
from kvhub.fit.study import choose, choose_recipe
from kvhub.fit.train import held_out_score, train_all
from kvhub.fit.workers import Workers
from kvhub.model.identity import Geometry
from kvhub.model.placement import input_device

if TYPE_CHECKING:
    from kvhub.model.load import LoadedModel

__all__ = ["Fitted", "Progress", "demand_possible", "fit_pair", "fit_sides"]

OBJECTIVE = "mean-squared-error"


@dataclass(frozen=True)
class Fitted:
    """A mapper in memory: a manifest without files, and its tensors."""

    manifest: Manifest
    tensors: dict[str, Tensor]


def demand_possible(
    source: Geometry, target: Geometry, settings: FitSettings, *, both: bool, rows: int | None = None
) -> None:
    """Refuse what cannot be fitted before any forward is run.

    rows: how many the text gives; None skips that check. Errors: `BadInput` (k,
    too few rows), `Incompatible` (head-local with unequal heads).
    """
    for one, other in ((source, target), (target, source))[: 1 + both]:
        smallest = settings.grid(one)[0]
        if settings.support == "head-local" and one.num_kv_heads != other.num_kv_heads:
            raise Incompatible(
                f"head-local support needs equal KV head counts, not {one.num_kv_heads}"
                f" and {other.num_kv_heads}",
                "use --support full",
                code="heads",
            )
        needed = settings.width(one, smallest) + 1
        if rows is not None and rows < needed:
            per_window = len(row_positions(settings.length, settings.stride, settings.exact_prefix))
            raise BadInput(
                f"the text gives {rows} rows and k = {smallest} needs at least {needed}"
                f" ({-(-needed // per_window) * settings.length} tokens at this length and stride)",
                "give more text or --sequences, a smaller --stride or a smaller --k",
            )


def fit_pair(
    source: LoadedModel,
    target: LoadedModel,
    windows: CalibrationSet,
    settings: FitSettings,
    *,
    both: bool = False,
    progress: Progress | None = None,
) -> list[Fitted]:
    """Fit `source -> target`, and with `both` also `target -> source` from the same captures.

    The two directions are exactly what two single fits give. Errors: those of
    `demand_possible`, `check_pair` and `capture`; `KvhubError` where a Gram is
    not positive definite or a weight does not fit the stored dtype.
    """
    return fit_sides(Side.of(source), Side.of(target), windows, settings, both=both, progress=progress)


def fit_sides(
    source: Side,
    target: Side,
    windows: CalibrationSet,
    settings: FitSettings,
    *,
    both: bool = False,
    low_memory: bool = False,
    layers: int | None = None,
    checkpoint: Checkpoint | None = None,
    team: Workers | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Fitted]:
    """`fit_pair` with models that may be loaded only when they are needed, or captures on disk.

    low_memory: all captures of one model, then of the other; both sides need a store. layers: target
    layers at a time, where not all moments fit; needs low_memory. checkpoint: where to go on from.
    team: the processes that share the work; only the first one gets a result. say: is told, in a line, what
    was asked for with `auto` and cannot be.
    """
    from kvhub.model.pair import check_pair

    check_pair(source.identity, target.identity)
    pairs = ((source, target), (target, source))[: 1 + both]
    for _, two in pairs:
        normalises(settings, two.identity)  # refused before any forward
    team = team or Workers()
    tell = progress or (lambda stage, done, total: None)
    shapes = source.identity.geometry, target.identity.geometry
    demand_possible(*shapes, settings, both=both, rows=windows.rows(settings.stride, settings.exact_prefix))
    if layers is None:
        hint = "use --low-memory, or a machine with more memory"
        demand_memory(
            moment_bytes(*shapes, both=both),
            hint=f"fit one direction at a time, or {hint}" if both else hint,
        )
    if low_memory:
        fill_captures(source, target, windows, team, tell)
    settings = settled(settings, (source, target), list(windows.fit[:LOOK]))
    told = say if team.first else lambda line: None
    norms = [norms_for(two, settings, windows.fit[0], told) for _, two in pairs]
    release()  # the captures that were looked at
    if layers is not None:
        if not team.first:
            return []
        if settings.recipe == "best":
            raise BadInput("this recipe needs all moments in memory at once", "give it more memory")
        found = [
            solve_in_blocks(*pair, list(windows.fit), settings, layers, tell, norm)
            for pair, norm in zip(pairs, norms, strict=True)
        ]
        found = train_all(pairs, found, windows, settings, checkpoint, tell)
        return _fitted(pairs, found, [None] * len(pairs), windows, settings, checkpoint, tell)
    device = moments_device(_device(source), moment_bytes(*shapes, both=both))
    moments = PairMoments.zeros(*shapes, both=both, device=device)
    accumulate(
        moments, source, target, list(windows.fit), settings, team=team, checkpoint=checkpoint, tell=tell
    )
    if not team.first:
        return []
    release()  # the windows' buffers
    found = []
    selections: list[Selection | None] = []
    total = sum(two.identity.geometry.num_layers for _, two in pairs)
    for (one, two), norm in zip(pairs, norms, strict=True):
        sums = moments if one is source else moments.reversed()
        shape = one.identity.geometry, two.identity.geometry
        scores = layer_scores(sums, *shape)
        selection: Selection | None = None
        if settings.recipe == "best":
            solved, selection = choose_recipe(sums, scores, one, two, windows.tuning, settings, norm, tell)
        else:
            if settings.automatic:
                selection = choose(sums, scores, one, two, windows.tuning, settings, norm, tell)
            k = settings.grid(shape[0])[0] if selection is None else selection.k
            strength = settings.regularization
            if strength == "auto":
                assert selection is not None
                strength = Regularization(selection.regularization)
            done = sum(len(solved.layers) for solved in found)
            solved = solve_pair(
                sums,
                *shape,
                top_layers(scores, k),
                strength,
                settings,
                norm,
                tell=lambda step, done=done: tell("solve", done + step, total),  # type: ignore[misc]
            )
        found.append(solved)
        selections.append(selection)
        del sums
    del moments
    release()
    found = train_all(pairs, found, windows, settings, checkpoint, tell)
    return _fitted(pairs, found, selections, windows, settings, checkpoint, tell)


def _recipe(solved: Solved, settings: FitSettings) -> str | None:
    what = solved.recipe
    if what is not None and settings.first_weight != 1:
        what = f"first row x{settings.first_weight}, {what}"
    if settings.recipe == "default":
        what = (
            f"first row x{settings.first_weight},"
            f" keys {'normalised' if solved.normalised else f'stretched {settings.stretch:g}'},"
            f" values {'stretched ' if solved.normalised else ''}{settings.stretch_values:g}"
        )
    return settings.recipe if what is None else f"{settings.recipe}: {what}"


def _device(side: Side) -> torch.device:
    if not side.resident:
        return torch.device("cpu")
    with side.live() as model:
        return input_device(model.model)


def _fitted(
    pairs: tuple[tuple[Side, Side], ...],
    found: list[Solved],
    selections: list[Selection | None],
    windows: CalibrationSet,
    settings: FitSettings,
    checkpoint: Checkpoint | None,
    tell: Progress,
) -> list[Fitted]:
    source, target = pairs[0]
    positions = row_positions(windows.held_out.shape[1], settings.stride, settings.exact_prefix)
    scores = [held_out_score(solved) for solved in found]
    tell("score", 0, len(windows.held_out))
    for number, window in enumerate(windows.held_out, 1):
        here, there = source.capture(window), target.capture(window)
        for score, direction in zip(scores, ((here, there), (there, here)), strict=False):
            score.add(*direction, positions)
        tell("score", number, len(windows.held_out))
    created = settings.created or (
        checkpoint.created if checkpoint else datetime.now(UTC).isoformat(timespec="microseconds")
    )
    return [
        Fitted(
            Manifest(
                kvhub_version=kvhub.__version__,
                family="mlp" if solved.perceptron else NORMALISED if solved.normalised else "ridge",
                support=solved.support or settings.support,
                source=one.identity,
                target=two.identity,
                k=len(solved.layers[0]),
                regularization=solved.regularization.value,
                regularization_convention=solved.regularization.convention,
                objective=OBJECTIVE if solved.training is None else solved.training.objective,
                source_layers=solved.layers,
                exact_prefix=settings.exact_prefix,
                weights_dtype=settings.store_dtype,
                calibration=windows.describe(settings.stride, settings.exact_prefix),
                fit_scores=score.result(),
                selection=selection,
                recipe=_recipe(solved, settings),
                perceptron=solved.perceptron,
                training=solved.training,
                created=created,
                files=[],
            ),
            solved.tensors,
        )
        for (one, two), solved, selection, score in zip(pairs, found, selections, scores, strict=True)
    ]
