"""How far the attention's output moves, and how far that moves the residual stream.

Beyond the published quantities: a cosine forgets the length of the error and what the output
projection and the residual stream make of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvhub.diagnostics.attention import causal_weights, per_query_head


class OutputError(NamedTuple):
    """Of one layer, float64; means over queries."""

    output: Tensor
    """`[heads]`: sum |o_hat - o|^2 / sum |o|^2 of the head's attention output."""
    attention_kl: Tensor
    """`[heads]`: KL(native weights || mapped weights), nat: what the keys alone do."""
    residual: Tensor
    """`[]`: sum |W_O (o_hat - o)|^2 / sum |h + W_O o|^2, h being what enters the layer: how far one layer's
    error pushes the residual stream, as a share of what leaves its attention."""


def output_error(
    queries: Tensor,
    scaling: float,
    native: tuple[Tensor, Tensor],
    mapped: tuple[Tensor, Tensor],
    projection: Tensor,
    residual: Tensor,
) -> OutputError:
    """Errors of one layer where the target goes on from a mapped prefix, its own queries given.

    queries `[heads, n, d]`; native: the target's (K, V) rows of prefix and tail; mapped: those of the
    prefix, mapped. The tail's rows are native on both sides, as they are in serving, and attention is
    causal. projection: W_O `[hidden, heads * d]`; residual `[n, hidden]`.
    """
    heads = queries.shape[0]
    split = mapped[0].shape[0]
    keys, values = (torch.cat((m.to(n.dtype), n[split:])) for m, n in zip(mapped, native, strict=True))
    before = causal_weights(queries, native[0], scaling)
    after = causal_weights(queries, keys, scaling)
    right = before @ per_query_head(native[1].float(), heads)
    wrong = after @ per_query_head(values.float(), heads)
    right, moved = right.double(), (wrong - right).double()
    onto = projection.double().T
    moves, writes = (out.transpose(0, 1).flatten(1) @ onto for out in (moved, right))
    stream = residual.double() + writes
    tiny = torch.finfo(torch.float32).tiny
    before, after = before.double(), after.double()
    ratio = before * (before.clamp_min(tiny).log() - after.clamp_min(tiny).log())
    return OutputError(
        output=moved.square().sum((1, 2)) / right.square().sum((1, 2)).clamp_min(tiny),
        attention_kl=ratio.sum(-1).mean(-1).clamp_min(0.0),
        residual=moves.square().sum() / stream.square().sum().clamp_min(tiny),
    )
