"""A perceptron on rows, grouped: one network for a whole layer, or one a head.

Plain torch; the reference is written out in the tests. Two hidden layers with ReLU are what
arXiv 2608.03893 (section 4.4) fits in the place of the ridge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 1024
"""Rows at a time: the hidden rows of a long prompt would be larger than its cache."""


class Dense(NamedTuple):
    """`x @ weight + bias` in each of `g` groups: weight `[g, a, b]`, bias `[g, b]`."""

    weight: Tensor
    bias: Tensor


def perceptron(rows: Tensor, layers: Sequence[Dense]) -> Tensor:
    """rows `[g, tokens, p]` through all layers, ReLU between them; `[g, tokens, c]`, differentiable."""
    for number, (weight, bias) in enumerate(layers):
        if number:
            rows = rows.relu()
        rows = torch.baddbmm(bias[:, None], rows, weight.to(rows.dtype))
    return rows


@torch.no_grad()
def apply_perceptron(rows: Tensor, layers: Sequence[Dense]) -> Tensor:
    """`perceptron`, in chunks of tokens; biases and the result in float32, products in the dtype of rows."""
    out = []
    for start in range(0, rows.shape[1], CHUNK):
        hidden = rows[:, start : start + CHUNK]
        for number, (weight, bias) in enumerate(layers):
            product = torch.bmm(hidden, weight).float().add_(bias[:, None])
            last = number == len(layers) - 1
            hidden = product if last else product.relu_().to(rows.dtype)
        out.append(hidden)
    return torch.cat(out, dim=1) if out else rows.new_zeros((len(rows), 0, layers[-1].bias.shape[1]))
