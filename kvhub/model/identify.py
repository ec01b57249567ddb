"""Identify a model from its files: what its KV rows mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args

from kvhub.errors import BadInput
from kvhub.model.complete import demand_complete, demand_shapes
from kvhub.model.config import read_config
from kvhub.model.fingerprint import hub_snapshot, weight_files, weight_headers, weights_revision
from kvhub.model.geometry import geometry
from kvhub.model.headers import TensorHeader
from kvhub.model.identity import Dtype, Geometry, ModelIdentity, RopeSpec
from kvhub.model.live import check_live
from kvhub.model.pair import check_pair
from kvhub.model.rope import rope_spec
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
        raise BadInput(f"dtype {dtype!r} is not one of {', '.join(get_args(Dtype))}", "--dtype bfloat16")
    path = path.absolute()
    architecture, shape, rope = describe(path)
    if model is not None:
        check_live(model, shape, rope, dtype)
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


def describe(path: Path, tensors: Mapping[str, TensorHeader] | None = None) -> tuple[str, Geometry, RopeSpec]:
    """Architecture, geometry and RoPE by config and headers: what can be refused before weights are read.

    tensors: the headers of the weights, where they are not read from files in `path`.
    """
    described = read_config(path)
    if tensors is None:
        tensors = weight_headers(weight_files(path))
    needed = demand_complete(described.config, tensors, str(path))
    shape = geometry(described.config, tensors, str(path))
    demand_shapes(needed, tensors, str(path))
    return described.architecture.name, shape, rope_spec(described.config, str(path))
