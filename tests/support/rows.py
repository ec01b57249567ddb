"""Models whose rows are a fixed function of (model, token, position), and mappers between them."""

from __future__ import annotations

from typing import Any

import torch

from kvhub.artifact.manifest import Calibration, FitScores, Manifest
from kvhub.mapper import SourceRows
from kvhub.mapper.ridge import RidgeMapper
from kvhub.model.identity import Geometry, ModelIdentity, RopeSpec

ROPE = RopeSpec(
    rope_type="default",
    rotary_dim=8,
    pairing="half",
    attention_factor=1.0,
    inverse_frequencies=[1.0, 0.1, 0.01, 0.001],
    parameters={"rope_type": "default", "rope_theta": 10000.0},
    max_position=4096,
)


def identity(name: str, layers: int, heads: int) -> ModelIdentity:
    """A model of head_dim 8 whose weights are named by `name`."""
    seed = (name.encode().hex() + "0" * 64)[:64]
    shape = Geometry(
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=8,
        hidden_size=16,
        k_norm=False,
    )
    return ModelIdentity(
        name=name,
        revision=f"fingerprint:{seed}",
        architecture="test",
        dtype="float32",
        geometry=shape,
        rope=ROPE,
        tokenizer="0" * 64,
        chat_template=None,
    )


SMALL, LARGE = identity("org/small", 3, 1), identity("org/large", 2, 2)


def native_rows(model: ModelIdentity, tokens: list[int], positions: range) -> torch.Tensor:
    """What `model` computes for `tokens` at `positions`: `[layers, 2, tokens, heads, 8]`."""
    g = model.geometry
    where = torch.tensor(list(positions), dtype=torch.float64)[None, None, :, None, None]
    what = torch.tensor(tokens, dtype=torch.float64)[None, None, :, None, None]
    layer = torch.arange(g.num_layers, dtype=torch.float64)[:, None, None, None, None]
    side = torch.arange(2, dtype=torch.float64)[None, :, None, None, None]
    unit = torch.arange(g.features, dtype=torch.float64).view(1, 1, 1, g.num_kv_heads, g.head_dim)
    phase = len(model.name) + 1.7 * layer + 0.9 * side + 0.31 * unit
    return torch.sin(phase + 0.013 * what + 0.0071 * where * (1 + unit)).float()


def mapper_between(source: ModelIdentity, target: ModelIdentity, *, exact_prefix: int = 0) -> RidgeMapper:
    """A real ridge mapper with random weights, all source layers into each target layer."""
    layers = source.geometry.num_layers
    manifest = Manifest(
        kvhub_version="test",
        family="ridge",
        support="full",
        source=source,
        target=target,
        k=layers,
        regularization=1e-3,
        regularization_convention="relative-mean-diagonal",
        objective="test",
        source_layers=[list(range(layers))] * target.geometry.num_layers,
        exact_prefix=exact_prefix,
        weights_dtype="float32",
        calibration=Calibration(
            dataset="test", revision=None, sequences=1, length=1, stride=1, tokens=1, rows=1, digest="0" * 64
        ),
        fit_scores=FitScores(rows=1, r2_key=[0.0], r2_value=[0.0]),
        created="2026-01-01T00:00:00+00:00",
        files=[],
    )
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for layer in range(target.geometry.num_layers):
        for side in ("k", "v"):
            rows, columns = source.geometry.num_layers * source.geometry.features, target.geometry.features
            tensors[f"layers.{layer}.{side}.weight"] = torch.randn(rows, columns, generator=generator) / rows
            tensors[f"layers.{layer}.{side}.bias"] = torch.randn(
                target.geometry.num_kv_heads, 8, generator=generator
            )
    return RidgeMapper(manifest, tensors)


def mapped_rows(mapper: Any, source_rows: torch.Tensor, positions: range) -> torch.Tensor:
    """The reference: `map_layer` over whole rows, `[target layers, 2, tokens, heads, 8]`."""
    source = SourceRows(
        list(source_rows[:, 0]),
        list(source_rows[:, 1]),
        torch.tensor(list(positions)),
        mapper.manifest.source.rope,
    )
    layers = range(mapper.manifest.target.geometry.num_layers)
    return torch.stack([torch.stack(mapper.map_layer(layer, source)) for layer in layers])
