"""One tiny model per kind of RoPE: its model type and what differs from `make_tiny`'s defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.tiny import LLAMA3, make_tiny

THETA = 10000.0
DEFAULT: dict[str, Any] = {"rope_type": "default", "rope_theta": THETA}
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 256}
SHORT, LONG = [1.0 + 0.25 * i for i in range(8)], [2.0 + i for i in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": THETA,
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 65536,
}
FAR = {"max_position_embeddings": 131072}
PHI3 = {"model_type": "phi3", "hidden": 64}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_parameters": DEFAULT},
    "linear": {"rope_parameters": DEFAULT | {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_parameters": DEFAULT | {"rope_type": "dynamic", "factor": 4.0}, **FAR},
    "llama3": {"rope_parameters": LLAMA3, "model_type": "llama"},
    "yarn": {"rope_parameters": YARN, "model_type": "qwen2"},
    "yarn attention_factor": {"rope_parameters": YARN | {"attention_factor": 1.5}},
    "yarn mscale": {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}, "model_type": "llama"},
    "yarn betas": {"rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}},
    "longrope": {"rope_parameters": LONGROPE, "model_type": "llama", **FAR},
    "longrope attention_factor": {"rope_parameters": LONGROPE | {"attention_factor": 1.25}, **FAR},
    "phi3": {**PHI3, "rope_parameters": DEFAULT},
    "phi3 partial": {**PHI3, "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.75}},
    "phi3 longrope partial": {
        **PHI3,
        **FAR,
        "original_max_position_embeddings": 65536,
        "rope_parameters": LONGROPE
        | {"partial_rotary_factor": 0.5, "short_factor": SHORT[:4], "long_factor": LONG[:4]},
    },
    "glm partial interleaved": {"model_type": "glm", "rope_parameters": DEFAULT},
    "glm4 partial interleaved": {
        "model_type": "glm4",
        "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.25},
    },
    "glm yarn": {"model_type": "glm", "rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
    "cohere interleaved": {"model_type": "cohere", "rope_parameters": DEFAULT},
    "cohere linear": {
        "model_type": "cohere",
        "rope_parameters": DEFAULT | {"rope_type": "linear", "factor": 4.0},
    },
    "mistral": {"model_type": "mistral", "rope_parameters": DEFAULT},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "rope_parameters": YARN,
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
    },
}


def make_rope(path: Path, name: str, **more: Any) -> Path:
    """The model of `ROPES[name]`: 3 layers, 2 KV heads of 16, in `path`."""
    return make_tiny(path, **(ROPES[name] | more))
