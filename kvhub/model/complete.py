"""Weights that a model must have: one that is absent means a damaged download, not another model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvhub.errors import Corrupt, Incompatible
from kvhub.model.built import layer_parts
from kvhub.model.headers import TensorHeader
from kvhub.strict_json import shown

_LAYER = re.compile(r"^((?:model\.)?layers\.)(\d+)\.(.+)$")
_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
_COMPUTED = {"F64", "F32", "F16", "BF16"}
"""What transformers reads as plain weights."""


def demand_complete(config: Any, tensors: Mapping[str, TensorHeader], where: str) -> None:
    """Refuse weights that are not those of the model that transformers builds from `config`.

    config: transformers'. Another *number* of layers than the config's is no damage but a disagreement,
    which `geometry` refuses. Errors: `Corrupt` naming the first weight that is absent; `Incompatible` with
    code `geometry` (norms of queries or keys that the model would not use, embeddings of another vocabulary)
    or `quantized_weights` (a dtype that is no float of 16 bits or more).
    """
    parts: dict[int, set[str]] = {}
    prefix = "model.layers."
    for name in tensors:
        if match := _LAYER.match(name):
            prefix = match[1]
            parts.setdefault(int(match[2]), set()).add(match[3])
    if not parts:
        return  # named otherwise
    if sorted(parts) == list(range(len(parts))) and len(parts) != config.num_hidden_layers:
        return
    needed = layer_parts(config, where)
    if any(".experts." in name for name in tensors):
        # They lie in files otherwise than in memory, and some layers of such a model may have none.
        needed = {part for part in needed if not part.startswith("mlp.")}
    for number in range(config.num_hidden_layers):
        found = parts.get(number, set())
        if absent := needed - found:
            raise _absent(where, f"{prefix}{number}.{min(absent)}")
        if unused := (found & set(_NORMS)) - needed:
            raise Incompatible(
                f"{where}: the weights have {prefix}{number}.{min(unused)},"
                f" which a {config.model_type} has not",
                "correct model_type in config.json, or fetch the model again",
                code="geometry",
            )
    ends = _demand_ends(config, tensors, prefix.removesuffix("layers."), where)
    layers = (f"{prefix}{number}.{part}" for number in range(config.num_hidden_layers) for part in needed)
    for name in (*ends, *layers):
        if (dtype := tensors[name].dtype) not in _COMPUTED:
            raise Incompatible(
                f"{where}: {name} is {shown(dtype, 16)}: quantised weights are not supported",
                code="quantized_weights",
            )


def _demand_ends(config: Any, tensors: Mapping[str, TensorHeader], root: str, where: str) -> list[str]:
    """What is before and behind the layers; its names in `tensors`."""
    embedding, head, norm = f"{root}embed_tokens.weight", "lm_head.weight", f"{root}norm.weight"
    tied = bool(getattr(config, "tie_word_embeddings", False))
    if embedding not in tensors and not (tied and head in tensors):
        raise _absent(where, embedding)
    for name in (norm, *([] if tied else [head])):
        if name not in tensors:
            raise _absent(where, name)
    found = [name for name in (embedding, head) if name in tensors]
    expected = (config.vocab_size, config.hidden_size)
    for name in found:
        if tensors[name].shape != expected:
            raise Incompatible(
                f"{where}: {name} is {list(tensors[name].shape)}, config.json says {list(expected)}",
                code="geometry",
            )
    return [*found, norm]


def _absent(where: str, name: str) -> Corrupt:
    return Corrupt(f"{where}: the weights have no {name}", "download the model again")
