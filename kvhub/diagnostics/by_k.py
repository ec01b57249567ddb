"""R2 against k: what each further source layer adds, on rows that the fit did not see."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvhub.diagnostics.maps import PairRows
from kvhub.diagnostics.record import KPoint
from kvhub.errors import KvhubError
from kvhub.fit.moments import Moments
from kvhub.fit.ridge import Regularization, solve_layer
from kvhub.fit.selection import layer_scores, top_layers
from kvhub.fit.settings import GRID_K
from kvhub.model.identity import within_bounds

MARGIN = 2
"""Rows for each feature below which a k is left out: its R2 would say more of the text than of k."""


def r2_by_k(
    fitted: PairRows, held_out: PairRows, regularization: Regularization | None = None
) -> list[KPoint]:
    """Held-out R2 of the ridge on the k best source layers, for each k of `GRID_K` and all layers.

    arXiv 2608.03893, Table 7, but on other rows than those fitted on. R2 of a layer is over all heads and
    dimensions; the mean over target layers is returned. Both sides are moments alone: no row is kept.
    """
    regularization = regularization or Regularization()
    source, target = fitted.source, fitted.target
    for rows in (fitted, held_out):
        rows.moments.flush()
    scores = layer_scores(fitted.moments, source, target)
    every = source.num_layers
    found: list[KPoint] = []
    for k in [*(k for k in GRID_K if k < every), every]:
        if fitted.moments.key.n < MARGIN * k * source.features:
            break
        chosen = top_layers(scores, k)
        try:
            key, value = (
                np.mean(
                    [_held_out_r2(a, b, fitted, layer, of, regularization) for layer, of in enumerate(chosen)]
                )
                for a, b in (
                    (fitted.moments.key, held_out.moments.key),
                    (fitted.moments.value, held_out.moments.value),
                )
            )
        except KvhubError:  # a singular system at this k says nothing of a larger one
            continue
        found.append(KPoint(k=k, r2_key=within_bounds(float(key)), r2_value=within_bounds(float(value))))
    return found


def _held_out_r2(
    fitted: Moments,
    held_out: Moments,
    rows: PairRows,
    layer: int,
    chosen: Sequence[int],
    regularization: Regularization,
) -> float:
    """R2 from moments alone: with e = y - (x - m_x) W - m_y, sum |e|^2 is a quadratic form in W."""
    affine = solve_layer(fitted, rows.source, rows.target, layer, chosen, regularization)
    inputs = torch.cat([_block(rows.source.features, one) for one in chosen])
    outputs = _block(rows.target.features, layer)
    n = held_out.n
    shift_x = held_out.mean_x(inputs) - affine.mean_x
    shift_y = held_out.mean_y(outputs) - affine.mean_y
    xx = held_out.centred_xx(inputs[:, None], inputs[None, :])
    xy = held_out.centred_xy(inputs[:, None], outputs[None, :])
    spread = held_out.centred_yy()[outputs].sum()
    weight = affine.weight
    centred = spread - 2 * (weight * xy).sum() + (weight * (xx @ weight)).sum()
    bias = n * (shift_y - shift_x @ weight).square().sum()
    return float(1 - (centred + bias) / spread) if float(spread) > 0 else 0.0


def _block(features: int, layer: int) -> Tensor:
    return layer * features + torch.arange(features)
