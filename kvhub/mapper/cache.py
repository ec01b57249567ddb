"""Between a transformers cache and rows: checked on the way in, built on the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvhub.errors import BadInput, Incompatible
from kvhub.model.identity import ModelIdentity


def cache_rows(cache: Any, identity: ModelIdentity, what: str) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values per layer, `[batch, num_kv_heads, tokens, head_dim]`, of a transformers cache.

    Errors: `Incompatible(code="geometry")` where the cache is not `identity`'s (layers, heads, size,
    dtype); `BadInput` where it is empty, ragged or holds NaN or infinity.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        raise BadInput(f"the {what} cache is not a transformers Cache", "pass model(...).past_key_values")
    shape = identity.geometry
    if len(layers) != shape.num_layers:
        raise Incompatible(
            f"the {what} cache has {len(layers)} layers, not {shape.num_layers}", code="geometry"
        )
    keys: list[Any] = [getattr(layer, "keys", None) for layer in layers]
    values: list[Any] = [getattr(layer, "values", None) for layer in layers]
    if any(not isinstance(row, Tensor) or row.dim() != 4 for row in (*keys, *values)):
        raise BadInput(f"the {what} cache is empty")
    batch, _, tokens, _ = keys[0].shape
    if not batch or not tokens:
        raise BadInput(f"the {what} cache is empty")
    expected = (batch, shape.num_kv_heads, tokens, shape.head_dim)
    for index, (key, value) in enumerate(zip(keys, values, strict=True)):
        for row in (key, value):
            if tuple(row.shape) != expected:
                found = f"is {list(row.shape)}, not {list(expected)}"
                raise Incompatible(f"layer {index} of the {what} cache {found}", code="geometry")
            if row.dtype != getattr(torch, identity.dtype):
                found = f"holds {row.dtype}, {identity.name} caches {identity.dtype}"
                raise Incompatible(f"the {what} cache {found}", code="geometry")
            if not bool(torch.isfinite(row).all()):
                raise BadInput(f"layer {index} of the {what} cache holds NaN or infinity")
    return keys, values


def as_rows(layers: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """`[batch, heads, tokens, dim]` per layer to `[batch * tokens, heads, dim]`, on `device`."""
    return [layer.transpose(1, 2).flatten(0, 1).to(device) for layer in layers]


def as_layer(rows: Tensor, batch: int) -> Tensor:
    """The inverse of `as_rows` for one layer."""
    return rows.reshape(batch, -1, *rows.shape[1:]).transpose(1, 2).contiguous()
