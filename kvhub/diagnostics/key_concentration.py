"""K error concentration: does the error of the keys point where queries look?"""

from __future__ import annotations

import torch
from torch import Tensor

from kvhub.diagnostics.attention import per_query_head


def key_error_concentration(queries: Tensor, native: Tensor, mapped: Tensor) -> Tensor:
    """K error concentration of every query head, `[heads]` float64.

    queries: `[heads, n, d]`, after RoPE; native, mapped: keys as cached, `[tokens, kv_heads, d]`.

    arXiv 2608.03893, section 4: project the error e_t of every token's key on the right singular
    vectors v_j of the head's query matrix Q = U S V^T, weight component j by s_j^2 and divide by the mean:

        c_j = mean_t (e_t . v_j)^2        concentration = (sum_j s_j^2 c_j / sum_j s_j^2) / mean_j c_j

    1: the error is spread evenly; above 1: it lies in directions that queries use. The paper leaves the
    norm and the space open; here errors are squared and both sides carry RoPE, so that e . q is the error
    of a logit. A head without error has 1. No decomposition is made: sum_j s_j^2 (e . v_j)^2 = e^T Q^T Q e.
    """
    q = queries.double()
    errors = per_query_head(mapped.double() - native.double(), len(q))
    metric = q.transpose(-1, -2) @ q  # [heads, d, d]
    energy = metric.diagonal(dim1=-2, dim2=-1).sum(-1)
    seen = ((errors @ metric) * errors).sum(-1).mean(-1) / energy
    mean = errors.square().sum(-1).mean(-1) / errors.shape[-1]  # over all d directions, seen or not
    return torch.where(mean > 0, seen / torch.where(mean > 0, mean, 1.0), 1.0)
