"""Identify a model from its files: what its KV rows mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast, get_args

from kvhub.errors import BadInput, Incompatible
from kvhub.model.config import read_config
from kvhub.model.fingerprint import hub_snapshot, weight_files, weight_headers, weights_revision
from kvhub.model.geometry import geometry
from kvhub.model.identity import Dtype, Geometry, ModelIdentity, RopeSpec
from kvhub.model.pair import check_pair
from kvhub.model.rope import rope_spec, rope_spec_from_module, same_angles
from kvhub.model.tokenizer import chat_template_digest, load_tokenizer, tokenizer_digest
from kvhub.strict_json import shown

__all__ = ["check_pair", "describe", "identify"]


def identify(
    path: Path, *, dtype: str, name: str | None = None, model: Any = None, tokenizer: Any = None
) -> ModelIdentity:
    """The identity of the model in directory `path`, computed from config, headers and tokenizer.

    dtype: what the model computes and caches in (`float32`, `bfloat16`, `float16`).
    model, tokenizer: the loaded transformers ones, where there are any; the live rotary module and
    the projections are then checked against the files.
    Errors: `NotFound`, `Corrupt`, `BadInput`, and `Incompatible` whose code names what is unsupported.
    """
    if dtype not in get_args(Dtype):
        raise BadInput(f"dtype {dtype!r} is not one of {', '.join(get_args(Dtype))}")
    path = path.absolute()
    architecture, shape, rope = describe(path)
    if model is not None:
        _check_live(model, shape, rope, dtype)
    tokenizer = load_tokenizer(path) if tokenizer is None else tokenizer
    snapshot = hub_snapshot(path)
    return ModelIdentity(
        name=shown(name or (snapshot[0] if snapshot else path.name) or "model", 256),
        revision=weights_revision(path),
        architecture=architecture,
        dtype=cast(Dtype, dtype),
        geometry=shape,
        rope=rope,
        tokenizer=tokenizer_digest(tokenizer),
        chat_template=chat_template_digest(tokenizer),
    )


def describe(path: Path) -> tuple[str, Geometry, RopeSpec]:
    """Architecture, geometry and RoPE by config and headers: what can be refused in milliseconds."""
    described = read_config(path)
    shape = geometry(described.config, weight_headers(weight_files(path)), str(path))
    return described.architecture.name, shape, rope_spec(described.config)


def _check_live(model: Any, shape: Geometry, rope: RopeSpec, dtype: str) -> None:
    if (found := str(model.dtype).removeprefix("torch.")) != dtype:
        raise Incompatible(f"the model was loaded in {found}, not {dtype}", code="dtype")
    if not same_angles(rope, rope_spec_from_module(model.model.rotary_emb)):
        # Casting a whole model to bfloat16 by hand also rounds its rotary frequencies.
        raise Incompatible(
            "the loaded model's RoPE differs from its config",
            "load it with from_pretrained(dtype=...) and do not cast it afterwards",
            code="rope_live",
        )
    layers = model.model.layers
    if len(layers) != shape.num_layers:
        raise Incompatible(
            f"the loaded model has {len(layers)} layers, not {shape.num_layers}", code="geometry"
        )
    for layer in layers:
        attention = layer.self_attn
        if attention.head_dim != shape.head_dim or attention.k_proj.out_features != shape.features:
            raise Incompatible("the loaded model's KV cache differs from its config", code="geometry")
        if hasattr(attention, "k_norm") != shape.k_norm:
            raise Incompatible("the loaded model's k_norm differs from its weights", code="geometry")
