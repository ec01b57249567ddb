"""Ridge in its dual form: a few hundred rows, however many features.

A full-head ridge has thousands of inputs and a few hundred tokens have fewer rows. Its predictions need
only the products of rows with each other, which add up over source layers and heads: they are taken once, and
every k and support is a sum of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Fold(NamedTuple):
    """Row numbers fitted on and predicted."""

    fitted: Tensor
    held_out: Tensor


def head_kernels(layers: Sequence[Tensor]) -> Tensor:
    """Products of rows, head by head: `[layers, heads, rows, rows]` float64 from `[rows, heads, d]` each."""
    stacked = torch.stack([layer.to(torch.float64).transpose(0, 1) for layer in layers])
    return stacked @ stacked.transpose(-1, -2)


def predict(kernel: Tensor, features: int, targets: Tensor, fold: Fold, strengths: Sequence[float]) -> Tensor:
    """Rows that a ridge fitted on `fold.fitted` gives for `fold.held_out`, for each relative lambda.

    kernel: `[rows, rows]`, sum of the products of the inputs; features: how many inputs they come from;
    targets: `[rows, outputs]` float64. Returns `[strengths, held_out, outputs]`: exactly what the centred
    primal ridge with bias and lambda = strength * mean(diag(Gram)) predicts (arXiv 2608.03893, eq. 3-5).
    """
    inside = kernel[fold.fitted[:, None], fold.fitted]
    across = kernel[fold.held_out[:, None], fold.fitted]
    row_means, mean = inside.mean(0), inside.mean()
    inside = inside - row_means[:, None] - row_means[None, :] + mean
    across = across - across.mean(1, keepdim=True) - row_means[None, :] + mean
    centre = targets[fold.fitted].mean(0)
    wanted = targets[fold.fitted] - centre
    scale = inside.diagonal().sum() / features  # the mean diagonal of the primal Gram
    identity = torch.eye(len(inside), dtype=inside.dtype)
    found = []
    for strength in strengths:
        # 1e-12 of the trace keeps rows that repeat each other solvable; it is far below any lambda used.
        damp = strength * scale + 1e-12 * inside.diagonal().sum()
        factor = torch.linalg.cholesky(inside + damp * identity)
        found.append(across @ torch.cholesky_solve(wanted, factor) + centre)
    return torch.stack(found)


def folds(windows: int, rows: int, count: int) -> list[Fold]:
    """`count` folds by whole windows (`rows` each): rows of one window resemble each other."""
    number = torch.arange(windows).repeat_interleave(rows)
    return [
        Fold(torch.nonzero(number % count != at)[:, 0], torch.nonzero(number % count == at)[:, 0])
        for at in range(min(count, windows))
    ]
