"""The shape of a model's KV cache, from its config and checked against its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvhub.errors import BadInput, Incompatible
from kvhub.model.headers import TensorHeader
from kvhub.model.identity import Geometry
from kvhub.strict_json import first_fault

_ATTENTION = re.compile(
    r"^(?:model\.)?layers\.(\d+)\.self_attn\.(q_proj|k_proj|v_proj|qkv_proj|k_norm)\.weight$"
)


def geometry(config: Any, tensors: Mapping[str, TensorHeader], where: str) -> Geometry:
    """Geometry by `config` (transformers), confirmed by the shapes of the projections in `tensors`.

    An explicit `head_dim` always wins over hidden_size / heads. `k_norm` is read from the weights.
    Errors: `BadInput` (impossible numbers), `Incompatible(code="geometry")` (config and weights differ).
    """
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        if config.hidden_size % heads:
            raise BadInput(f"{where}: hidden_size {config.hidden_size} is not a multiple of {heads} heads")
        head_dim = config.hidden_size // heads
    shapes = _attention_shapes(tensors)
    layers, hidden = config.num_hidden_layers, config.hidden_size
    if "qkv_proj" in shapes:  # Phi-3
        _confirm(shapes, "qkv_proj", layers, ((heads + 2 * kv_heads) * head_dim, hidden), where)
    else:
        _confirm(shapes, "k_proj", layers, (kv_heads * head_dim, hidden), where)
        _confirm(shapes, "v_proj", layers, (kv_heads * head_dim, hidden), where)
        _confirm(shapes, "q_proj", layers, (heads * head_dim, hidden), where)
    if "k_norm" in shapes:
        # [head_dim]: one norm for every head. OLMo2's is over all heads at once and would not fit here.
        _confirm(shapes, "k_norm", layers, (head_dim,), where)
    try:
        return Geometry(
            num_layers=layers,
            num_attention_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            hidden_size=hidden,
            k_norm="k_norm" in shapes,
        )
    except ValidationError as error:
        raise BadInput(f"{where}: config.json: {first_fault(error)}") from None


def _attention_shapes(tensors: Mapping[str, TensorHeader]) -> dict[str, dict[int, tuple[int, ...]]]:
    shapes: dict[str, dict[int, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        if match := _ATTENTION.match(name):
            shapes.setdefault(match[2], {})[int(match[1])] = tensor.shape
    return shapes


def _confirm(
    shapes: dict[str, dict[int, tuple[int, ...]]],
    part: str,
    layers: int,
    expected: tuple[int, ...],
    where: str,
) -> None:
    found = shapes.get(part, {})
    if sorted(found) != list(range(layers)):
        raise Incompatible(
            f"{where}: config.json has {layers} layers, the weights have {part} for {len(found)}",
            code="geometry",
        )
    for layer, shape in found.items():
        if shape != expected:
            raise Incompatible(
                f"{where}: {part} of layer {layer} is {list(shape)}, config.json says {list(expected)}",
                code="geometry",
            )
