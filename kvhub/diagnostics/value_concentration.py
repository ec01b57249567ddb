"""V error concentration: does the error of the values lie at the tokens that attention reads?"""

from __future__ import annotations

import torch
from torch import Tensor

from kvhub.diagnostics.attention import per_query_head


def value_error_concentration(weights: Tensor, native: Tensor, mapped: Tensor) -> Tensor:
    """V error concentration of every query head, `[heads]` float64.

    weights: native attention `[heads, n, tokens]`; native, mapped: values `[tokens, kv_heads, d]`.

    arXiv 2608.03893, section 4: weight the error of every position by its squared native attention
    weight and divide by the mean error. With several queries their squared weights are added:

        w_i = sum_u a_ui^2        concentration = (sum_i w_i |e_i|^2 / sum_i w_i) / mean_i |e_i|^2

    1: attention reads tokens that are as wrong as any; above 1: it reads the wrong ones. A head without
    error has 1.
    """
    errors = per_query_head(mapped.double() - native.double(), weights.shape[0])
    squared = errors.square().sum(-1)  # [heads, tokens]
    read = weights.double().square().sum(1)
    seen = (read * squared).sum(-1) / read.sum(-1)
    mean = squared.mean(-1)
    return torch.where(mean > 0, seen / torch.where(mean > 0, mean, 1.0), 1.0)
