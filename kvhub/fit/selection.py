"""Layer selection: which source layers each target layer is mapped from.

arXiv 2608.03893, section 2.3: score a source layer by the R2 of an ordinary
least squares with bias from one source head to the matched target head, on
content keys and on values; average over heads, then over K and V; keep the top
k. One list per target layer serves K, V and all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvhub.errors import BadInput
from kvhub.fit.moments import Moments, PairMoments
from kvhub.model.identity import Geometry
from kvhub.strict_json import shown

TOLERANCE = 1e-10
"""Directions of a source head whose variance is below this share of its largest count as constant."""
NOISE = 1e-13
"""So does what is below this share of the uncentred squares: rounding of the sums, not variance."""


def matched_heads(source: Geometry, target: Geometry) -> list[int]:
    """The source head that each target head is scored against: floor(h * H_s / H_t).

    Equal counts give the same index; otherwise neighbouring heads share one, as
    in grouped attention. Only the scores depend on it: `full` support reads all heads.
    """
    return [h * source.num_kv_heads // target.num_kv_heads for h in range(target.num_kv_heads)]


def layer_scores(moments: PairMoments, source: Geometry, target: Geometry) -> Tensor:
    """Score of every (target layer, source layer) from flushed moments, `[target layers, source layers]`."""
    return (
        single_source_r2(moments.key, source, target) + single_source_r2(moments.value, source, target)
    ) / 2


def select_layers(moments: PairMoments, source: Geometry, target: Geometry, k: int) -> list[list[int]]:
    """`top_layers` from moments. Errors: `BadInput` if `k` is not in 1 ... the number of source layers."""
    demand_k(k, source)
    return top_layers(layer_scores(moments, source, target), k)


def demand_k(k: int, source: Geometry) -> None:
    """`BadInput` naming the largest k where `k` cannot be used."""
    layers = source.num_layers
    if not 1 <= k <= layers:
        raise BadInput(
            f"--k {shown(k, 20)} is outside 1..{layers} (the source has {layers} layers)",
            f"use --k 1 to {layers}",
        )


def top_layers(scores: Tensor, k: int) -> list[list[int]]:
    """The `k` best source layers of every target layer, ascending; the lower layer wins a tie.

    scores: `[target layers, source layers]`, of `layer_scores`.
    """
    # Scores of exchangeable layers differ in the last bits only; rounding makes the tie exact.
    rounded = scores.mul(1e12).round().tolist()
    return [sorted(sorted(range(len(row)), key=lambda s: (-row[s], s))[:k]) for row in rounded]


def single_source_r2(moments: Moments, source: Geometry, target: Geometry) -> Tensor:
    """R2 of head-matched OLS with bias, averaged over target heads, `[target layers, source layers]`.

    Within a head R2 is 1 - (sum of squared errors) / (sum of squares about the
    mean), both over all of the head's dimensions. A target head that never
    varies scores 0. Singular sources are solved by their pseudo-inverse.
    """
    device = moments.x.device
    layers, heads, dim = target.num_layers, target.num_kv_heads, target.head_dim
    total = moments.centred_yy().reshape(layers, heads, dim).sum(-1)
    varies = total > NOISE * moments.raw_yy().reshape(layers, heads, dim).sum(-1)
    matched = torch.tensor(matched_heads(source, target), device=device)
    within = torch.arange(source.head_dim, device=device)
    outputs = torch.arange(layers * heads * dim, device=device).reshape(layers, heads, dim)
    outputs = outputs.transpose(0, 1).reshape(heads, 1, layers * dim)

    scores = torch.zeros(layers, source.num_layers, dtype=torch.float64, device=device)
    for number in range(source.num_layers):
        every = torch.arange(source.num_kv_heads, device=device)
        inputs = number * source.features + every[:, None] * source.head_dim + within
        gram = moments.centred_xx(inputs[:, :, None], inputs[:, None, :])
        variances, directions = torch.linalg.eigh(gram)
        floor = NOISE * moments.xx.diagonal()[inputs].amax(1, keepdim=True)
        usable = variances > torch.maximum(TOLERANCE * variances[:, -1:], floor)
        scale = torch.where(usable, variances, torch.inf).rsqrt()
        whitened = (directions * scale[:, None, :])[matched]
        cross = moments.centred_xy(inputs[matched][:, :, None], outputs)
        explained = (whitened.transpose(1, 2) @ cross).square().reshape(heads, -1, layers, dim).sum((1, 3))
        r2 = torch.where(varies, explained.T / torch.where(varies, total, 1.0), 0.0)
        scores[:, number] = r2.mean(1)
    return scores
