"""Fit a pair of loaded models: capture, moments, selection, ridge, held-out R2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import kvhub
from kvhub.artifact.manifest import Manifest
from kvhub.errors import BadInput, Incompatible, KvhubError
from kvhub.fit.calibration import CalibrationSet, row_positions
from kvhub.fit.capture import Capture, capture
from kvhub.fit.moments import Moments, PairMoments, demand_memory, memory_needed, moments_device
from kvhub.fit.ridge import solve_layer
from kvhub.fit.score import HeldOutScore
from kvhub.fit.selection import demand_k, select_layers
from kvhub.fit.settings import FitSettings
from kvhub.model.identity import Geometry

if TYPE_CHECKING:
    from kvhub.model.load import LoadedModel

Progress = Callable[[str, int, int], None]
"""Called with (stage, steps done, steps in all); stages are `capture`, `solve` and `score`."""

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
    too few rows, memory), `Incompatible` (head-local with unequal heads).
    """
    for one, other in ((source, target), (target, source))[: 1 + both]:
        demand_k(settings.k, one)
        if settings.support == "head-local" and one.num_kv_heads != other.num_kv_heads:
            raise Incompatible(
                f"head-local support needs equal KV head counts, not {one.num_kv_heads}"
                f" and {other.num_kv_heads}",
                "use --support full",
                code="heads",
            )
        needed = settings.features(one) + 1
        if rows is not None and rows < needed:
            per_window = len(row_positions(settings.length, settings.stride, settings.exact_prefix))
            raise BadInput(
                f"the text gives {rows} rows and k = {settings.k} needs at least {needed}"
                f" ({-(-needed // per_window) * settings.length} tokens at this length and stride)",
                "give more text, a smaller --stride or a smaller --k",
            )
    demand_memory(source, target, k=settings.k, both=both)


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
    from kvhub.model.pair import check_pair

    check_pair(source.identity, target.identity)
    shapes = source.identity.geometry, target.identity.geometry
    length = windows.fit.shape[1]
    positions = row_positions(length, settings.stride, settings.exact_prefix)
    demand_possible(*shapes, settings, both=both, rows=len(windows.fit) * len(positions))
    tell = progress or (lambda stage, done, total: None)

    needed = memory_needed(*shapes, k=settings.k, both=both)
    device = moments_device(torch.device(source.model.device), needed)
    moments = PairMoments.zeros(*shapes, both=both, device=device)
    for here, there in _captures(source, target, windows.fit, "capture", tell):
        moments.add(here.rows(positions), there.rows(positions))
    moments.flush()

    first, layers = shapes[1].num_layers, shapes[1].num_layers + both * shapes[0].num_layers
    found = [_solve(moments, source, target, settings, lambda done: tell("solve", done, layers))]
    if both:
        back = moments.reversed()
        found.append(_solve(back, target, source, settings, lambda done: tell("solve", first + done, layers)))
        del back
    del moments
    scores = [HeldOutScore(tensors, chosen) for chosen, tensors in found]
    for here, there in _captures(source, target, windows.held_out, "score", tell):
        for score, direction in zip(scores, ((here, there), (there, here)), strict=False):
            score.add(*direction, positions)

    created = settings.created or datetime.now(UTC).isoformat(timespec="seconds")
    return [
        Fitted(
            Manifest(
                kvhub_version=kvhub.__version__,
                family="ridge",
                support=settings.support,
                source=pair[0].identity,
                target=pair[1].identity,
                k=settings.k,
                regularization=settings.regularization.value,
                regularization_convention=settings.regularization.convention,
                objective=OBJECTIVE,
                source_layers=chosen,
                exact_prefix=settings.exact_prefix,
                weights_dtype=settings.store_dtype,
                calibration=windows.describe(settings.stride, settings.exact_prefix),
                fit_scores=score.result(),
                created=created,
                files=[],
            ),
            tensors,
        )
        for pair, (chosen, tensors), score in zip(
            ((source, target), (target, source)), found, scores, strict=False
        )
    ]


def _captures(
    source: LoadedModel, target: LoadedModel, windows: Tensor, stage: str, tell: Progress
) -> Iterator[tuple[Capture, Capture]]:
    tell(stage, 0, len(windows))
    for number, window in enumerate(windows, 1):
        yield capture(source, window), capture(target, window)
        tell(stage, number, len(windows))


def _solve(
    moments: PairMoments,
    source: LoadedModel,
    target: LoadedModel,
    settings: FitSettings,
    tell: Callable[[int], None],
) -> tuple[list[list[int]], dict[str, Tensor]]:
    shapes = source.identity.geometry, target.identity.geometry
    layers = select_layers(moments, *shapes, settings.k)
    tensors: dict[str, Tensor] = {}
    kinds: tuple[tuple[str, Moments], ...] = (("k", moments.key), ("v", moments.value))
    for number, chosen in enumerate(layers):
        for name, side in kinds:
            affine = solve_layer(
                side, *shapes, number, chosen, settings.regularization, support=settings.support
            )
            weight = affine.weight.to(getattr(torch, settings.store_dtype))
            bias = affine.bias(weight).to(torch.float32).reshape(shapes[1].num_kv_heads, shapes[1].head_dim)
            for part, tensor in (("weight", weight), ("bias", bias)):
                if not bool(torch.isfinite(tensor).all()):
                    raise KvhubError(
                        f"the fit of target layer {number} is not finite", "use a larger --lambda"
                    )
                tensors[f"layers.{number}.{name}.{part}"] = tensor.cpu().contiguous()
        tell(number + 1)
    return layers, tensors
