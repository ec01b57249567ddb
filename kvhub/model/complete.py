"""Weights that a model must have: one that is absent means a damaged download, not another model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvhub.errors import Corrupt, Incompatible
from kvhub.model.built import layer_parts
from kvhub.model.experts import MIXTURES, mlp_parts
from kvhub.model.headers import TensorHeader
from kvhub.strict_json import shown

_LAYER = re.compile(r"^((?:model\.)?layers\.)(0|[1-9]\d*)\.(.+)$")
_UNUSED = ".inv_freq"
"""Old checkpoints keep the rotary frequencies, which are computed."""
_COMPUTED = {"F64", "F32", "F16", "BF16"}
"""What transformers reads as plain weights."""

Parts = dict[str, tuple[int, ...]]
"""Shapes by the name within a layer."""


def demand_complete(config: Any, tensors: Mapping[str, TensorHeader], where: str) -> Parts:
    """Refuse weights that are not those of the model that transformers builds from `config`.

    transformers loads what it knows, leaves random numbers where a weight is absent and ignores what it does
    not know (biases, norms): both are another model than the files hold. config: transformers'. Another
    *number* of layers than the config's is no damage but a disagreement, which `geometry` refuses. Returns
    what its layers have, for `demand_shapes`; empty where that was not looked at. Errors: `Corrupt`
    naming the first weight that is absent; `Incompatible` with code `geometry` (weights in a layer that the
    model would not use, embeddings of another vocabulary) or `quantized_weights` (a dtype that is no float
    of 16 bits or more).
    """
    layers: dict[int, set[str]] = {}
    prefix = "model.layers."
    for name in tensors:
        if match := _LAYER.match(name):
            prefix = match[1]
            layers.setdefault(int(match[2]), set()).add(match[3])
    if not layers:
        return {}  # named otherwise
    if sorted(layers) == list(range(len(layers))) and len(layers) != config.num_hidden_layers:
        return {}
    needed = layer_parts(config, where)
    mixture = config.model_type in MIXTURES
    fused = any(name.endswith(".experts.gate_up_proj") for name in tensors)
    if mixture:  # experts lie in files otherwise than in memory, and some layers may have none
        needed = {part: shape for part, shape in needed.items() if not part.startswith("mlp.")}
    known = dict(needed)
    for number in range(config.num_hidden_layers):
        found, here = layers.get(number, set()), needed
        if mixture:
            here = needed | mlp_parts(config, number, fused=fused, where=where)
            known |= here
        if absent := here.keys() - found:
            raise _absent(where, f"{prefix}{number}.{min(absent)}")
        if unused := {part for part in found - here.keys() if not part.endswith(_UNUSED)}:
            raise Incompatible(
                f"{where}: the weights have {prefix}{number}.{shown(min(unused), 80)},"
                f" which a {config.model_type} of this config has not",
                "correct config.json, or fetch the model again",
                code="geometry",
            )
    ends = _demand_ends(config, tensors, prefix.removesuffix("layers."), where)
    for name in (*ends, *(name for name in tensors if name.startswith(prefix))):
        if (dtype := tensors[name].dtype) not in _COMPUTED:
            raise Incompatible(
                f"{where}: {shown(name, 120)} is {shown(dtype, 16)}: quantised weights are not supported",
                code="quantized_weights",
            )
    return known


def demand_shapes(known: Parts, tensors: Mapping[str, TensorHeader], where: str) -> None:
    """Refuse (`Incompatible`, code `geometry`) a layer's weight of another shape than the model's.

    After `geometry`, which names what the cache rests on in its own words.
    """
    for name, tensor in tensors.items():
        match = _LAYER.match(name)
        if match and match[3] in known:
            _demand_shape(name, tensor, known[match[3]], where)


def _demand_ends(config: Any, tensors: Mapping[str, TensorHeader], root: str, where: str) -> list[str]:
    """What is before and behind the layers; its names in `tensors`."""
    embedding, head, norm = f"{root}embed_tokens.weight", "lm_head.weight", f"{root}norm.weight"
    tied = bool(getattr(config, "tie_word_embeddings", False))
    if embedding not in tensors and not (tied and head in tensors):
        raise _absent(where, embedding)
    for name in (norm, *([] if tied else [head])):
        if name not in tensors:
            raise _absent(where, name)
    for name in (f"{root}norm.bias", "lm_head.bias"):
        if name in tensors:
            raise Incompatible(
                f"{where}: the weights have {name}, which a {config.model_type} has not",
                "correct config.json, or fetch the model again",
                code="geometry",
            )
    _demand_shape(norm, tensors[norm], (config.hidden_size,), where)
    found = [name for name in (embedding, head) if name in tensors]
    for name in found:
        _demand_shape(name, tensors[name], (config.vocab_size, config.hidden_size), where)
    return [*found, norm]


def _demand_shape(name: str, tensor: TensorHeader, expected: tuple[int, ...], where: str) -> None:
    if tensor.shape != expected:
        raise Incompatible(
            f"{where}: {name} is {list(tensor.shape)}, config.json says {list(expected)}", code="geometry"
        )


def _absent(where: str, name: str) -> Corrupt:
    return Corrupt(f"{where}: the weights have no {name}", "download the model again")
