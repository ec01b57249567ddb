"""Run a model over one window and read its KV cache, keys with RoPE removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvhub.errors import BadInput, KvhubError
from kvhub.model.placement import input_device
from kvhub.model.rope import rotary_table
from kvhub.model.tokenizer import demand_embedded
from kvhub_kernels.rotary import strip_rope

if TYPE_CHECKING:
    from kvhub.model.identity import RopeSpec
    from kvhub.model.load import LoadedModel


@dataclass(frozen=True)
class Capture:
    """One tensor per layer, `[tokens, num_kv_heads, head_dim]`.

    content_keys: float32, rotation removed; keys and values as the model caches
    them (keys after k_norm and RoPE), in its dtype.
    """

    content_keys: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]

    def rows(self, positions: range) -> tuple[Tensor, Tensor]:
        """Content keys and values of all layers side by side, float64 `[rows, layers * heads * head_dim]`."""
        chosen = slice(positions.start, positions.stop, positions.step)
        return _side_by_side(self.content_keys, chosen), _side_by_side(self.values, chosen)


def capture(model: LoadedModel, token_ids: Tensor) -> Capture:
    """The cache of `model` over `token_ids` (`[tokens]` int64), positions 0, 1, 2, ...

    Errors: `BadInput` if the window is longer than the model's context, or a token has no embedding;
    `KvhubError` naming the layer where the cache is not finite.
    """
    demand_embedded(model.model, token_ids)
    rope = model.identity.rope
    if len(token_ids) > rope.context:
        raise BadInput(
            f"windows of {len(token_ids)} tokens exceed the context of {model.identity.name}"
            f" ({rope.context})",
            "use a shorter --length",
        )
    return _capture(model.model, token_ids, rope, model.identity.name)


def _capture(model: Any, token_ids: Tensor, rope: RopeSpec, name: str) -> Capture:
    home = input_device(model)
    ids = token_ids.to(home)[None]
    with torch.inference_mode():
        # The body alone: logits over the vocabulary would cost more than a small model's layers.
        cache = model.base_model(input_ids=ids, use_cache=True).past_key_values
        table = rotary_table(rope, torch.arange(ids.shape[1], device=ids.device))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        content: list[Tensor] = []
        for number, layer in enumerate(cache.layers):
            # Gathered in one place, where the layers of a sharded model lie on several devices.
            key = layer.keys[0].transpose(0, 1).to(home)
            value = layer.values[0].transpose(0, 1).to(home)
            for what, rows in (("keys", key), ("values", value)):
                if not bool(torch.isfinite(rows).all()):
                    raise KvhubError(
                        f"the {what} that {name} caches in layer {number} hold NaN or infinity",
                        _overflow(rows.dtype),
                    )
            keys.append(key)
            values.append(value)
            # In float32: back in the cache's dtype it would be rounded a second time.
            content.append(strip_rope(key.to(torch.float32), table))
    return Capture(content, keys, values)


def _overflow(dtype: torch.dtype) -> str:
    """Why a cache is not finite: the weights are, or the model would not have been loaded."""
    if dtype == torch.float32:
        return "its weights are finite and its forward overflows even in float32: it cannot be used"
    kind = str(dtype).removeprefix("torch.")
    return f"its weights are finite, its forward overflows in {kind}: use --dtype float32"


def _side_by_side(layers: list[Tensor], chosen: slice) -> Tensor:
    return torch.cat([rows[chosen].flatten(1).to(torch.float64) for rows in layers], dim=1)
