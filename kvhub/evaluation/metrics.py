"""What is measured on one window: pure functions of logits and cached rows.

Likelihood metrics are over the scored tail positions; row metrics over the
mapped rows of the prefix. `summary.py` turns the sums into scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvhub.evaluation.inject import KvRows
from kvhub.model.identity import RopeSpec
from kvhub.model.rope import rotary_table
from kvhub_kernels.rotary import strip_rope

Array = NDArray[np.float64]
_CHUNK = 32  # positions a float64 copy of the vocabulary is made for at a time


@dataclass(frozen=True)
class LogitSums:
    """Sums over the scored positions of one window, for one arm."""

    nll: float
    """-log p(next token), nat."""
    kl: float
    """KL(native || arm) over the full vocabulary, nat."""
    top1: float
    """Positions whose most likely token is the native arm's."""


def compare_logits(native: Tensor, arm: Tensor, labels: Tensor) -> LogitSums:
    """Sums for one arm. native, arm: `[n, vocabulary]` float32; labels: `[n]` int64.

    Where the two models pad their vocabularies differently only the common ids count.
    """
    width = min(native.shape[-1], arm.shape[-1])
    nll = kl = top1 = 0.0
    for at in range(0, len(labels), _CHUNK):
        p = native[at : at + _CHUNK, :width].double().log_softmax(-1)
        q = arm[at : at + _CHUNK, :width].double().log_softmax(-1)
        wanted = labels[at : at + _CHUNK, None].to(q.device)
        nll -= float(q.gather(-1, wanted).sum())
        kl += float((p.exp() * (p - q)).sum())
        top1 += float((p.argmax(-1) == q.argmax(-1)).sum())
    return LogitSums(nll, kl, top1)


def gap_recovered(native: Array, source: Array, mapped: Array) -> Array:
    """(NLL_source - NLL_mapped) / (NLL_source - NLL_native); elementwise, NaN where the gap is not positive.

    1: as good as the target itself; 0: no better than staying with the source; negative: worse.
    It has no meaning where the source alone is at least as good as the target.
    """
    gap = source - native
    return np.divide(source - mapped, gap, out=np.full_like(gap, np.nan), where=gap > 0)


def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attention of `[heads, n, d]` queries over all of `[tokens, kv_heads, d]` rows, in float32.

    Query head h reads KV head h // (heads / kv_heads). Returns `[heads, n, d]`.
    """
    groups = query.shape[0] // key.shape[1]
    k = key.float().transpose(0, 1).repeat_interleave(groups, 0)
    v = value.float().transpose(0, 1).repeat_interleave(groups, 0)
    weights = (query.float() @ k.transpose(-1, -2) * scaling).softmax(-1)
    return weights @ v


def attention_cosine(
    query: Tensor, scaling: float, native: tuple[Tensor, Tensor], mapped: tuple[Tensor, Tensor]
) -> Array:
    """Mean over queries of cos(attention output on mapped K, V; on native K, V), per query head: `[heads]`.

    arXiv 2608.03893, section 4 (attention-output cosine). The queries are the target's own, native
    ones, at the tail positions; they attend to the prefix only, so every row that enters is one that
    the mapper answers for (rows of an exact prefix are native on both sides).
    """
    a, b = attend(query, *native, scaling), attend(query, *mapped, scaling)
    return np.asarray(torch.cosine_similarity(a, b, dim=-1).mean(-1).double().cpu().numpy())


def attention_cosines(
    queries: Mapping[int, Tensor] | Tensor,
    scaling: Mapping[int, float] | Sequence[float],
    native: KvRows,
    mapped: KvRows,
) -> Array:
    """`attention_cosine` of every layer, `[layers, heads]`; queries and scaling: by layer."""
    return np.stack(
        [
            attention_cosine(
                queries[layer],
                scaling[layer],
                (native.keys[layer], native.values[layer]),
                (mapped.keys[layer], mapped.values[layer]),
            )
            for layer in range(len(mapped.keys))
        ]
    )


@dataclass(frozen=True)
class RowMoments:
    """What R2 needs of one window's rows, for K or V: sums over rows, `[layers, heads, ...]` float64.

    R2 of a head: 1 - sum (y - y_hat)^2 / sum (y - mean)^2 over its rows and dimensions, the mean
    per dimension over the same rows; of a layer: the mean over heads (arXiv 2608.03893, section 3.2).
    """

    rows: int
    sums: Array
    """sum y, `[layers, heads, head_dim]`."""
    squares: Array
    """sum y^2 over rows and dimensions, `[layers, heads]`."""
    residuals: Array
    """sum (y - y_hat)^2 over rows and dimensions, `[layers, heads]`."""


def row_moments(native: KvRows, mapped: KvRows, rope: RopeSpec, skip: int) -> tuple[RowMoments, RowMoments]:
    """Moments of content keys and of values over rows `skip ...`: (K, V).

    Both caches hold the target's RoPE at positions `0 ... len - 1`; it is removed here.
    """
    table = rotary_table(rope, torch.arange(skip, len(native), device=native.keys[0].device))

    def content(key: Tensor) -> Tensor:
        return strip_rope(key[skip:].float(), table)

    keys = [(content(n), content(m)) for n, m in zip(native.keys, mapped.keys, strict=True)]
    values = [(n[skip:], m[skip:]) for n, m in zip(native.values, mapped.values, strict=True)]
    return _moments(keys), _moments(values)


def _moments(pairs: list[tuple[Tensor, Tensor]]) -> RowMoments:
    sums, squares, residuals = [], [], []
    for native, mapped in pairs:
        y = native.double()
        sums.append(y.sum(0).cpu().numpy())
        squares.append(y.square().sum((0, 2)).cpu().numpy())
        residuals.append((y - mapped.double()).square().sum((0, 2)).cpu().numpy())
    return RowMoments(pairs[0][0].shape[0], np.stack(sums), np.stack(squares), np.stack(residuals))
