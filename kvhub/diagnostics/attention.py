"""Attention weights of given queries, in float32, as the target would compute them."""

from __future__ import annotations

from torch import Tensor


def per_query_head(rows: Tensor, heads: int) -> Tensor:
    """`[tokens, kv_heads, d]` as `[heads, tokens, d]`: query head h reads KV head h // (heads / kv_heads)."""
    return rows.transpose(0, 1).repeat_interleave(heads // rows.shape[1], 0)


def attention_weights(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """softmax(q.k * scaling) of `[heads, n, d]` queries over all of `[tokens, kv_heads, d]` keys.

    Returns `[heads, n, tokens]`.
    """
    return _logits(queries, keys, scaling).softmax(-1)


def causal_weights(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """As `attention_weights`, where the last `n` keys are at the queries' own positions: none sees ahead."""
    count = queries.shape[1]
    logits = _logits(queries, keys, scaling)
    logits[:, :, -count:] += logits.new_full((count, count), float("-inf")).triu(1)
    return logits.softmax(-1)


def _logits(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    return queries.float() @ per_query_head(keys.float(), queries.shape[0]).transpose(-1, -2) * scaling
