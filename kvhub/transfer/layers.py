"""Which source layers look useful, from a few hundred tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvhub.transfer.dual import Fold, predict

STRENGTH = 0.1
"""Relative lambda of the probe: with so few rows a weak one would score noise."""


def cross_validated_scores(
    kernels: tuple[Tensor, Tensor],
    targets: tuple[Sequence[Tensor], Sequence[Tensor]],
    features: int,
    folds: Sequence[Fold],
) -> Tensor:
    """Held-out R2 of each source layer alone for each target layer, mean of K and V.

    kernels: of content keys and of values, `[source layers, heads, rows, rows]`; targets: `[rows, F]` by
    target layer; features: of one source layer. Returns `[target layers, source layers]`. In sample, as a
    fit scores its layers on many rows, a few hundred rows would fit anything.
    """
    count = len(kernels[0])
    scores = torch.zeros(len(targets[0]), count, dtype=torch.float64)
    for kernel, side in zip(kernels, targets, strict=True):
        widths = [rows.shape[1] for rows in side]
        together = torch.cat(list(side), dim=1)
        spread = (together - together.mean(0)).square().sum(0)
        for layer in range(count):
            errors = torch.zeros_like(spread)
            for fold in folds:
                found = predict(kernel[layer].sum(0), features, together, fold, [STRENGTH])[0]
                errors += (found - together[fold.held_out]).square().sum(0)
            sums = torch.stack((errors, spread))
            parts = [part.sum(1) for part in torch.split(sums, widths, dim=1)]
            r2 = torch.stack([1 - error / total.clamp_min(1e-300) for error, total in parts])
            scores[:, layer] += r2 / 2
    return scores
