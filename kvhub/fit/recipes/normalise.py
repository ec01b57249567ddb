"""Mapped keys through the target's own k_norm (`kvhub_kernels.normalise`): which fits have it, and the solve.

A norm forgets lengths, so a key is fitted to what stands before the norm's weight: `key / weight`, head by
head, whose root mean square is 1. Ridge treats columns alike, so that is the ridge of the keys with columns
divided. It is not stretched: the norm gives the length back, and on tuning windows of the shipped pair (small
to large) KL was 0.2288 without a stretch, 0.2296 with 0.25 and 0.2304 with 0.5.

The default recipe does so wherever the target has such a norm: it measured best in every direction
(docs/fidelity.md). A norm of another kind is left alone: keys are then stretched, as where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvhub.errors import Incompatible
from kvhub.fit.ridge import Affine
from kvhub.model.k_norm import demand_k_norm

if TYPE_CHECKING:
    from kvhub.fit.settings import FitSettings
    from kvhub.fit.side import Side
    from kvhub.model.identity import ModelIdentity

_SMALLEST = 1e-6
"""A weight below this share of the largest hides its dimension: nothing is known of it before the weight."""
_NEAR = 0.05
_MOST = 0.9
"""So many of all heads of all rows must be of the size that the norm gives them, to within `_NEAR`."""


def normalises(settings: FitSettings, target: ModelIdentity) -> bool:
    """Whether mapped keys of this target are normalised. Errors: `Incompatible(code="k_norm")` where they
    must be and cannot.
    """
    if settings.normalise_keys == "on":
        demand_k_norm(target)
    return settings.normalise_keys != "off" and target.geometry.k_norm


def norms_for(
    target: Side, settings: FitSettings, window: Tensor, say: Callable[[str], None] = lambda line: None
) -> Tensor | None:
    """The weights `[num_layers, head_dim]` of the target's k_norm where mapped keys go through it, else None.

    window: `[tokens]`; the target's keys of it must be what the norm makes. Where they are not, or the
    weights are not those of one norm for every head, `auto` goes without and `say` is told why. The answer
    depends on the target and the text alone: a fit that goes on finds the same one.
    Errors: `Incompatible(code="k_norm")` with `on`; those of `Side.capture`.
    """
    if not normalises(settings, target.identity):
        return None
    try:
        norms = target.k_norm
        check_norms(target, norms, window)
    except Incompatible as error:
        if settings.normalise_keys == "on" or error.code != "k_norm":
            raise
        instead = "stretched, not normalised" if settings.stretch else "not normalised"
        say(f"note: mapped keys are {instead}: {error.message}")
        return None
    return norms


def check_norms(target: Side, norms: Tensor, window: Tensor) -> None:
    """Refuse (`Incompatible`) a target whose keys are not what its k_norm's weights say.

    Every head of its content keys, over the weight, has a root mean square of 1; `window` is looked at. A
    norm over all heads at once gives that to their mean only, and a weight of 0 hides what was there.
    """
    for layer, (keys, norm) in enumerate(zip(target.capture(window).content_keys, norms, strict=True)):
        sizes = (keys.cpu() * inverse(norm)).square().mean(-1)
        if not float(((sizes - 1).abs() <= _NEAR).double().mean()) >= _MOST:
            raise Incompatible(
                f"the keys of {target.identity.name} in layer {layer} are not normalised by its k_norm",
                "use --normalise-keys off",
                code="k_norm",
            )


def stretch_share(side: str, settings: FitSettings, norms: Tensor | None) -> float:
    """How much of the spread of `side` (`k` or `v`) is given back (`kvhub.fit.recipes.scale`)."""
    if side == "v":
        return settings.stretch_values
    return settings.stretch if norms is None else 0.0


def unscaled(affine: Affine, norm: Tensor) -> Affine:
    """The map to keys as they are before `norm`, the weight `[head_dim]` of k_norm."""
    columns = inverse(norm).to(affine.mean_y)
    if affine.mean_y.dim() == 1:  # of all heads
        columns = columns.repeat(len(affine.mean_y) // len(columns))
    return replace(affine, weight=affine.weight * columns, mean_y=affine.mean_y * columns)


def inverse(norm: Tensor) -> Tensor:
    """1 / norm, 0 where it is too small to tell anything."""
    hidden = norm.abs() <= _SMALLEST * norm.abs().max()
    return torch.where(hidden, 0.0, 1 / torch.where(hidden, 1.0, norm))


def norm_in(tensors: Mapping[str, Tensor], target_layer: int) -> Tensor | None:
    """The weight of k_norm that a mapper's tensors have for a target layer; None: keys are not normalised."""
    return tensors.get(f"layers.{target_layer}.k.norm")
