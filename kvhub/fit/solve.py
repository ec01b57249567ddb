"""From moments to the tensors of a mapper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvhub.artifact.manifest import Perceptron, Training
from kvhub.errors import KvhubError
from kvhub.fit.moments import Moments, PairMoments
from kvhub.fit.recipes.scale import stretch
from kvhub.fit.ridge import Affine, Factors, Regularization, Support, solve_layer
from kvhub.fit.settings import FitSettings
from kvhub.model.identity import Geometry


@dataclass(frozen=True)
class Solved:
    """A mapper's tensors as they are stored, and what they were solved with."""

    layers: list[list[int]]
    """Selected source layers of every target layer."""
    regularization: Regularization
    tensors: dict[str, Tensor]
    support: Support | None = None
    """Where a search chose it; None: as asked."""
    recipe: str | None = None
    """What a search came to, for the manifest."""
    training: Training | None = None
    """Where gradients were used after the closed form, or in its place."""
    perceptron: Perceptron | None = None
    """Of the `mlp` family; None: `ridge`."""


def solve_pair(
    moments: PairMoments,
    source: Geometry,
    target: Geometry,
    layers: Sequence[Sequence[int]],
    regularization: Regularization,
    settings: FitSettings,
    *,
    tell: Callable[[int], None] = lambda step: None,
) -> Solved:
    """Solve every target layer. Errors: `KvhubError` where a system is singular or a weight not finite."""
    tensors: dict[str, Tensor] = {}
    factors = Factors(), Factors()
    for number, chosen in enumerate(layers):
        solve_into(
            tensors, moments, source, target, number, number, chosen, regularization, settings, factors
        )
        tell(number + 1)
    return Solved([list(chosen) for chosen in layers], regularization, tensors)


def solve_into(
    tensors: dict[str, Tensor],
    moments: PairMoments,
    source: Geometry,
    target: Geometry,
    number: int,
    within: int,
    chosen: Sequence[int],
    regularization: Regularization,
    settings: FitSettings,
    factors: tuple[Factors, Factors],
) -> None:
    """Put the tensors of target layer `number` into `tensors`.

    within, chosen: the target layer and its source layers as `moments` count them, which may hold a
    part of the layers only.
    """
    kinds: tuple[tuple[str, Moments, Factors], ...] = (
        ("k", moments.key, factors[0]),
        ("v", moments.value, factors[1]),
    )
    for name, side, known in kinds:
        affine = solve_layer(
            side, source, target, within, chosen, regularization, support=settings.support, factors=known,
            name=number,
        )  # fmt: skip
        share = settings.stretch if name == "k" else settings.stretch_values
        affine = stretch(affine, side, source, target, within, chosen, settings.support, share)
        tensors.update(stored(affine, number, name, target, settings))


def stored(
    affine: Affine, number: int, name: str, target: Geometry, settings: FitSettings
) -> dict[str, Tensor]:
    """Weight and bias of one side (`k` or `v`) of target layer `number` as an artifact holds them.

    Errors: `KvhubError` where a number is not finite in the stored dtype.
    """
    weight = affine.weight.to(getattr(torch, settings.store_dtype))
    bias = affine.bias(weight).to(torch.float32).reshape(target.num_kv_heads, target.head_dim)
    for tensor in (weight, bias):
        if not bool(torch.isfinite(tensor).all()):
            raise KvhubError(f"the fit of target layer {number} is not finite", "use a larger --lambda")
    prefix = f"layers.{number}.{name}"
    return {f"{prefix}.weight": weight.cpu().contiguous(), f"{prefix}.bias": bias.cpu().contiguous()}
