"""`Mapper.map`: a whole cache of the source to one of the target, with transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvhub.errors import BadInput
from kvhub.mapper.base import Mapper, SourceRows
from kvhub.mapper.cache import as_layer, as_rows, cache_rows
from kvhub.model.identity import ModelIdentity
from kvhub.model.pair import check_same

if TYPE_CHECKING:
    from transformers import DynamicCache

    from kvhub.model.load import LoadedModel


def map_cache(
    mapper: Mapper,
    source_cache: Any,
    source: LoadedModel | ModelIdentity,
    target: LoadedModel | ModelIdentity,
    native: Any,
    positions: Tensor | None,
) -> DynamicCache:
    """See `Mapper.map`."""
    from transformers import DynamicCache

    manifest = mapper.manifest
    source, target = _identity(source), _identity(target)
    check_same(manifest.source, source, code="source_identity")
    check_same(manifest.target, target, code="target_identity")
    keys, values = cache_rows(source_cache, source, "source")
    batch, _, tokens, _ = keys[0].shape
    exact = _native_rows(native, target, batch, tokens, manifest.exact_prefix)
    rows = SourceRows(
        as_rows(keys, mapper.device),
        as_rows(values, mapper.device),
        _positions(positions, tokens).to(mapper.device).repeat(batch),
        source.rope,
    )
    dtype, device = getattr(torch, target.dtype), keys[0].device
    mapped = DynamicCache()
    for layer in range(target.geometry.num_layers):
        pair = [as_layer(side.to(device, dtype), batch) for side in mapper.map_layer(layer, rows)]
        if exact is not None:
            for side, held in zip(pair, (exact[0][layer], exact[1][layer]), strict=True):
                side[:, :, : held.shape[2]] = held
        mapped.update(pair[0], pair[1], layer)
    return mapped


def _identity(model: LoadedModel | ModelIdentity) -> ModelIdentity:
    return model if isinstance(model, ModelIdentity) else model.identity


def _positions(positions: Tensor | None, tokens: int) -> Tensor:
    if positions is None:
        return torch.arange(tokens)
    if positions.shape != (tokens,) or positions.is_floating_point() or bool((positions < 0).any()):
        raise BadInput(f"positions must be {tokens} whole numbers from 0, one for each token")
    return positions.to(torch.int64)


def _native_rows(
    native: Any, target: ModelIdentity, batch: int, tokens: int, needed: int
) -> tuple[list[Tensor], list[Tensor]] | None:
    if native is None:
        if needed:
            raise BadInput(
                f"this mapper was fitted without the first {needed} tokens",
                f"run the target on them and pass its cache as native= (at least {needed} tokens)",
            )
        return None
    keys, values = cache_rows(native, target, "native")
    held = keys[0].shape[2]
    if keys[0].shape[0] != batch or not min(needed, tokens) <= held <= tokens:
        raise BadInput(
            f"the native cache must hold {needed} to {tokens} tokens of the same {batch} sequences"
        )
    return keys, values
