"""Weights that a model must have: one that is absent means a damaged download, not another model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvhub.errors import Corrupt
from kvhub.model.config import ARCHITECTURES
from kvhub.model.headers import TensorHeader

_LAYER = re.compile(r"^((?:model\.)?layers\.)(\d+)\.(.+)$")
_PART = re.compile(
    r"(?:self_attn\.(?:q|k|v|o|qkv)_proj|self_attn\.[qk]_norm|mlp\.\w+_proj|\w+_layernorm)\.(?:weight|bias)"
)


def demand_complete(config: Any, tensors: Mapping[str, TensorHeader], where: str) -> None:
    """Refuse weights whose layers do not all have the same parts, or that lack what every model has.

    config: transformers'. Another *number* of layers than the config's is no damage but a disagreement,
    which `geometry` refuses. What an architecture has besides is found when it is loaded.
    Errors: `Corrupt` naming the first weight that is absent.
    """
    parts: dict[int, set[str]] = {}
    prefix = "model.layers."
    for name in tensors:
        if match := _LAYER.match(name):
            prefix, number = match[1], int(match[2])
            found = parts.setdefault(number, set())
            if _PART.fullmatch(match[3]):
                found.add(match[3])
    if not parts:
        return  # named otherwise
    if sorted(parts) == list(range(len(parts))) and len(parts) != config.num_hidden_layers:
        return
    experts = any(".experts." in name for name in tensors)
    needed = {*_attention(config.model_type), *(part for found in parts.values() for part in found)}
    if experts:  # some layers of such a model may have none
        needed = {part for part in needed if not part.startswith("mlp.")}
    for number in range(config.num_hidden_layers):
        if absent := needed - parts.get(number, set()):
            raise _absent(where, f"{prefix}{number}.{min(absent)}")
    head, root = "lm_head.weight", prefix.removesuffix("layers.")
    embedding = f"{root}embed_tokens.weight"
    tied = bool(getattr(config, "tie_word_embeddings", False))
    if embedding not in tensors and not (tied and head in tensors):
        raise _absent(where, embedding)
    for name in (f"{root}norm.weight", *([] if tied else [head])):
        if name not in tensors:
            raise _absent(where, name)


def _attention(model_type: str) -> Iterable[str]:
    architecture = ARCHITECTURES[model_type]
    projections = ("qkv", "o") if architecture.fused else ("q", "k", "v", "o")
    yield from (f"self_attn.{name}_proj.weight" for name in projections)
    if architecture.k_norm:
        yield "self_attn.k_norm.weight"
    yield "input_layernorm.weight"


def _absent(where: str, name: str) -> Corrupt:
    return Corrupt(f"{where}: the weights have no {name}", "download the model again")
