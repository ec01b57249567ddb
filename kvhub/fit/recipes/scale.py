"""Give mapped rows back the spread that ridge took from them.

A regression predicts the mean: its rows vary less than the target's by R2, so that mapped keys flatten the
attention. The map of every target head is stretched about its mean by (spread of the target / spread of the
prediction) to the power `share`: 0 is ridge, 1 keeps the variance (HeteroFold, arXiv 2609.32259, matches the
whole covariance).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvhub.fit.moments import Moments, PairMoments
from kvhub.model.identity import Geometry


def stretch(
    tensors: Mapping[str, Tensor],
    layers: Sequence[Sequence[int]],
    moments: PairMoments,
    source: Geometry,
    target: Geometry,
    *,
    keys: float,
    values: float,
) -> dict[str, Tensor]:
    """Tensors of full support, stretched; keys, values: the share for each."""
    found: dict[str, Tensor] = {}
    for number, chosen in enumerate(layers):
        for name, side, share in (("k", moments.key, keys), ("v", moments.value, values)):
            prefix = f"layers.{number}.{name}"
            weight, bias = tensors[f"{prefix}.weight"], tensors[f"{prefix}.bias"]
            inputs = _inputs(source, chosen)
            factor = _ratio(side, weight.double(), inputs, number, target) ** share
            wide = weight.double() * factor.repeat_interleave(target.head_dim)
            kept = wide.to(weight.dtype)
            mean = side.mean_x(inputs) @ weight.double() + bias.double().flatten()
            found[f"{prefix}.weight"] = kept
            found[f"{prefix}.bias"] = (mean - side.mean_x(inputs) @ kept.double()).float().view(bias.shape)
    return found


def _inputs(source: Geometry, chosen: Sequence[int]) -> Tensor:
    wide = source.features
    return (torch.tensor(list(chosen))[:, None] * wide + torch.arange(wide)).flatten()


def _ratio(moments: Moments, weight: Tensor, inputs: Tensor, number: int, target: Geometry) -> Tensor:
    """Spread of the target over that of the prediction, `[heads]`."""
    gram = moments.centred_xx(inputs[:, None], inputs[None])
    predicted = (weight * (gram @ weight)).sum(0)
    start = number * target.features
    real = moments.centred_yy()[start : start + target.features]
    shape = target.num_kv_heads, target.head_dim
    return (real.view(shape).sum(1) / predicted.view(shape).sum(1).clamp_min(1e-30)).sqrt()
