"""Give mapped rows back the spread that ridge took from them.

A regression predicts the mean: its rows vary less than the target's by R2, so that mapped keys flatten the
attention. The map of every target head is stretched about its mean by (spread of the target / spread of the
prediction) to the power `share`: 0 is ridge, 1 keeps the variance (HeteroFold, arXiv 2609.32259, matches the
whole covariance).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from kvhub.fit.moments import Moments
from kvhub.fit.ridge import Affine, Support, indices
from kvhub.model.identity import Geometry


def stretch(
    affine: Affine,
    moments: Moments,
    source: Geometry,
    target: Geometry,
    number: int,
    chosen: Sequence[int],
    support: Support,
    share: float,
) -> Affine:
    """`affine` of target layer `number`, stretched; its mean stays. Arguments as in `solve_layer`."""
    if share == 0:
        return affine
    inputs, outputs = indices(source, target, number, chosen, support, moments.x.device)
    gram = moments.centred_xx(inputs[..., :, None], inputs[..., None, :])
    predicted = _heads((affine.weight * (gram @ affine.weight)).sum(-2), target)
    ratio = (_heads(moments.centred_yy()[outputs], target) / predicted.clamp_min(1e-30)).sqrt() ** share
    columns = ratio.repeat_interleave(target.head_dim).view(affine.mean_y.shape)
    return replace(affine, weight=affine.weight * columns[..., None, :])


def _heads(columns: Tensor, target: Geometry) -> Tensor:
    """Sums over each head's columns, `[heads]`."""
    return columns.reshape(target.num_kv_heads, target.head_dim).sum(1)
