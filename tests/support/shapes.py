"""Geometries and rows for tests of the maths, without models."""

from __future__ import annotations

import torch
from torch import Tensor

from kvhub.fit.moments import PairMoments
from kvhub.model.identity import Geometry


def shape(layers: int, heads: int, dim: int) -> Geometry:
    """A geometry of `layers` layers with `heads` KV heads of `dim`."""
    return Geometry(
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        hidden_size=8,
        k_norm=False,
    )


def correlated(rows: int, features: int, seed: int) -> Tensor:
    """Rows whose features depend on each other and have means of their own, float64."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, max(4, features // 3), generator=generator, dtype=torch.float64)
    mix = torch.randn(hidden.shape[1], features, generator=generator, dtype=torch.float64)
    noise = torch.randn(rows, features, generator=generator, dtype=torch.float64)
    return hidden @ mix + 0.5 * noise + torch.linspace(-20, 20, features, dtype=torch.float64)


def related(rows: int, source: Geometry, target: Geometry, seed: int) -> tuple[Tensor, Tensor]:
    """Source rows `[rows, F_s]` and target rows `[rows, F_t]` that partly follow from them."""
    x = correlated(rows, source.num_layers * source.features, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    features = target.num_layers * target.features
    mix = torch.randn(x.shape[1], features, generator=generator, dtype=torch.float64)
    mix *= torch.rand(x.shape[1], 1, generator=generator, dtype=torch.float64) ** 3
    noise = torch.randn(rows, features, generator=generator, dtype=torch.float64)
    return x, x @ mix / 10 + noise + 3.0


def pair_moments(
    key: tuple[Tensor, Tensor], value: tuple[Tensor, Tensor], source: Geometry, target: Geometry
) -> PairMoments:
    """Moments of the given (source, target) rows of keys and of values."""
    moments = PairMoments.zeros(source, target)
    moments.add((key[0], value[0]), (key[1], value[1]))
    moments.flush()
    return moments
