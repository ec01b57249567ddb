"""Manifests and tensors of mappers, without a fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvhub.artifact.manifest import Calibration, FitScores, Manifest
from kvhub.artifact.tensors import expected_tensors
from kvhub.model.identity import Geometry, ModelIdentity, RopeSpec


def make_identity(name: str = "org/model", **geometry: Any) -> ModelIdentity:
    """An identity without files; `geometry` overrides the default of 2 layers, 2 heads of 4."""
    shape = Geometry(
        **(
            {
                "num_layers": 2,
                "num_attention_heads": 4,
                "num_kv_heads": 2,
                "head_dim": 4,
                "hidden_size": 16,
                "k_norm": False,
            }
            | geometry
        )
    )
    return ModelIdentity(
        name=name,
        revision="commit:" + "a" * 40,
        architecture="LlamaForCausalLM",
        dtype="float32",
        geometry=shape,
        rope=RopeSpec(
            rope_type="default",
            rotary_dim=shape.head_dim,
            pairing="half",
            attention_factor=1.0,
            inverse_frequencies=[100.0**-i for i in range(shape.head_dim // 2)],
            parameters={"rope_theta": 10000.0},
            max_position=4096,
        ),
        tokenizer="b" * 64,
        chat_template=None,
    )


def make_manifest(
    source: ModelIdentity,
    target: ModelIdentity,
    *,
    k: int = 1,
    support: str = "full",
    source_layers: list[list[int]] | None = None,
    **changes: Any,
) -> Manifest:
    """A manifest with no files; target layer t reads source layers from `t % n` on unless given."""
    layers = source.geometry.num_layers
    chosen = source_layers or [
        sorted((t + i) % layers for i in range(k)) for t in range(target.geometry.num_layers)
    ]
    values: dict[str, Any] = {
        "kvhub_version": "0.1.0",
        "family": "ridge",
        "support": support,
        "source": source,
        "target": target,
        "k": k,
        "regularization": 1e-3,
        "regularization_convention": "relative-mean-diagonal",
        "objective": "ridge",
        "source_layers": chosen,
        "exact_prefix": 0,
        "weights_dtype": "float32",
        "calibration": Calibration(
            dataset="text",
            revision=None,
            sequences=1,
            length=8,
            stride=1,
            tokens=8,
            rows=8,
            digest="c" * 64,
        ),
        "fit_scores": FitScores(rows=1, r2_key=[0.5], r2_value=[0.5]),
        "created": "2026-01-01T00:00:00Z",
        "files": [],
    }
    return Manifest(**(values | changes))


def random_tensors(manifest: Manifest, seed: int = 0) -> dict[str, Tensor]:
    """Normal tensors of the shapes that the manifest asks for."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(manifest).items()
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes}


def identity_tensors(manifest: Manifest) -> dict[str, Tensor]:
    """Weights that copy the source (k = 1 and equal geometry), zero bias."""
    tensors = {}
    for name, shape in expected_tensors(manifest).items():
        weight = torch.zeros(shape)
        if name.endswith("weight"):
            weight.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        tensors[name] = weight
    return tensors
