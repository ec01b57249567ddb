"""Ridge with a heavier penalty on source heads that are not the matched one.

Between `full` support (equal penalties) and `head-local` (infinite ones): what the matched head explains, it
explains alone, and other heads are read only for what is left. One small factorisation a target head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvhub.errors import KvhubError
from kvhub.fit.moments import Moments, PairMoments
from kvhub.fit.recipes.normalise import stretch_share
from kvhub.fit.recipes.scale import stretch
from kvhub.fit.ridge import Affine, Regularization, indices
from kvhub.fit.selection import matched_heads
from kvhub.fit.settings import FitSettings
from kvhub.fit.solve import Solved, stored
from kvhub.model.identity import Geometry


def solve_groupwise(
    moments: PairMoments,
    source: Geometry,
    target: Geometry,
    layers: Sequence[Sequence[int]],
    regularization: Regularization,
    settings: FitSettings,
    norms: Tensor | None = None,
    *,
    factor: float = 10.0,
) -> Solved:
    """`solve_pair` with lambda times `factor` for heads that are not matched; full support.

    Errors: `KvhubError` where a system is not positive definite or a weight not finite.
    """
    tensors: dict[str, Tensor] = {}
    for number, chosen in enumerate(layers):
        for name, side in (("k", moments.key), ("v", moments.value)):
            affine = _layer(side, source, target, number, chosen, regularization, factor)
            share = stretch_share(name, settings, norms)
            affine = stretch(affine, side, source, target, number, chosen, "full", share)
            tensors |= stored(affine, number, name, target, settings, norms)
    return Solved([list(chosen) for chosen in layers], regularization, tensors)


def _layer(
    moments: Moments,
    source: Geometry,
    target: Geometry,
    number: int,
    chosen: Sequence[int],
    regularization: Regularization,
    factor: float,
) -> Affine:
    device, dim = moments.x.device, target.head_dim
    inputs, outputs = indices(source, target, number, chosen, "full", device)
    head_of = (torch.arange(source.features, device=device) // source.head_dim).repeat(len(chosen))
    gram = moments.centred_xx(inputs[:, None], inputs[None])
    cross = moments.centred_xy(inputs[:, None], outputs[None])
    strength = regularization.strength(gram, moments.n)
    parts = []
    for head, matched in enumerate(matched_heads(source, target)):
        penalised = gram.clone()
        penalised.diagonal().add_(torch.where(head_of == matched, strength, factor * strength))
        lower, failed = torch.linalg.cholesky_ex(penalised)
        if bool(failed.any()):
            raise KvhubError(
                f"the moments of target layer {number} are not positive definite", "use a larger --lambda"
            )
        parts.append(torch.cholesky_solve(cross[:, head * dim : (head + 1) * dim], lower))
    return Affine(torch.cat(parts, dim=1), moments.mean_x(inputs), moments.mean_y(outputs))
