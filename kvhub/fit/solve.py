"""From moments to the tensors of a mapper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvhub.artifact.manifest import Perceptron, Training
from kvhub.errors import KvhubError
from kvhub.fit.moments import Moments, PairMoments
from kvhub.fit.recipes.normalise import stretch_share, unscaled
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

    @property
    def normalised(self) -> bool:
        """Whether mapped keys go through the target's k_norm."""
        return any(name.endswith(".norm") for name in self.tensors)


def solve_pair(
    moments: PairMoments,
    source: Geometry,
    target: Geometry,
    layers: Sequence[Sequence[int]],
    regularization: Regularization,
    settings: FitSettings,
    norms: Tensor | None = None,
    *,
    tell: Callable[[int], None] = lambda step: None,
) -> Solved:
    """Solve every target layer. norms: of `kvhub.fit.recipes.normalise.norms_for`.

    Errors: `KvhubError` where a system is singular or a weight not finite.
    """
    tensors: dict[str, Tensor] = {}
    factors = Factors(), Factors()
    for number, chosen in enumerate(layers):
        solve_into(
            tensors, moments, source, target, number, number, chosen, regularization, settings, factors, norms
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
    norms: Tensor | None = None,
) -> None:
    """Put the tensors of target layer `number` into `tensors`.

    within, chosen: the target layer and its source layers as `moments` count them, which may hold a
    part of the layers only. norms: of all target layers.
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
        share = stretch_share(name, settings, norms)
        affine = stretch(affine, side, source, target, within, chosen, settings.support, share)
        tensors.update(stored(affine, number, name, target, settings, norms))


def stored(
    affine: Affine,
    number: int,
    name: str,
    target: Geometry,
    settings: FitSettings,
    norms: Tensor | None = None,
) -> dict[str, Tensor]:
    """Weight and bias of one side (`k` or `v`) of target layer `number` as an artifact holds them; with
    `norms` keys are mapped to what stands before k_norm, and its weight is stored with them.

    Errors: `KvhubError` where a number is not finite in the stored dtype.
    """
    prefix = f"layers.{number}.{name}"
    tensors: dict[str, Tensor] = {}
    if norms is not None and name == "k":
        affine = unscaled(affine, norms[number])
        tensors[f"{prefix}.norm"] = norms[number].clone()
    weight = affine.weight.to(getattr(torch, settings.store_dtype))
    bias = affine.bias(weight).to(torch.float32).reshape(target.num_kv_heads, target.head_dim)
    for tensor in (weight, bias):
        if not bool(torch.isfinite(tensor).all()):
            raise KvhubError(f"the fit of target layer {number} is not finite", "use a larger --lambda")
    return tensors | {
        f"{prefix}.weight": weight.cpu().contiguous(),
        f"{prefix}.bias": bias.cpu().contiguous(),
    }
