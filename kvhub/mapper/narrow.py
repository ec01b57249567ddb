"""A mapper for one tensor-parallel rank: it writes only the rank's KV heads of the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvhub.errors import Incompatible
from kvhub.exchange.shards import HeadSlice
from kvhub.mapper.base import Mapper
from kvhub.mapper.ridge import RidgeMapper

if TYPE_CHECKING:
    from torch import Tensor

    from kvhub.model.identity import ModelIdentity


def narrow(mapper: Mapper, heads: HeadSlice) -> Mapper:
    """`mapper` with the target heads `heads` alone, each computed as before.

    With `full` support it still needs every source head, with `head-local` support the
    same heads of the source: `manifest.source.geometry.num_kv_heads` of the result says how
    many. Its manifest is no artifact's: keep the digest of the one it came from.
    Errors: `Incompatible` with code `tensor_parallel` for a family or support that cannot be divided.
    """
    if heads.count == heads.total:
        return mapper
    manifest = mapper.manifest
    if type(mapper) is not RidgeMapper or manifest.support not in ("full", "head-local"):
        raise Incompatible(
            f"a {manifest.family} mapper with {manifest.support} support cannot be divided over ranks",
            "serve it without tensor parallelism",
            code="tensor_parallel",
        )
    local = manifest.support == "head-local"
    source = _with_heads(manifest.source, heads.count) if local else manifest.source
    target = _with_heads(manifest.target, heads.count)
    tensors = {
        name: tensor
        for layer in range(manifest.target.geometry.num_layers)
        for side in ("k", "v")
        for name, tensor in _divided(mapper, layer, side, heads, local=local).items()
    }
    for layer in range(manifest.target.geometry.num_layers):
        norm = mapper.norm(layer)  # one for all heads
        if norm is not None:
            tensors[f"layers.{layer}.k.norm"] = norm
    narrowed = manifest.model_copy(update={"source": source, "target": target})
    return RidgeMapper(narrowed, tensors, device=mapper.device, dtype=mapper.dtype)


def _divided(
    mapper: RidgeMapper, layer: int, side: str, heads: HeadSlice, *, local: bool
) -> dict[str, Tensor]:
    """What is stored of these heads: columns of a full weight, matrices of a head-local one."""
    weight, *columns = mapper.stored(layer, side)
    chosen = slice(heads.first, heads.first + heads.count)
    per_head = weight if local else weight.view(weight.shape[0], *columns[0].shape)
    weight = per_head[chosen] if local else per_head[:, chosen].flatten(1)
    prefix = f"layers.{layer}.{side}"
    found = {f"{prefix}.weight": weight.contiguous()}
    for part, column in zip(("bias", "scale"), columns, strict=False):  # a scale where the weights are int8
        found[f"{prefix}.{part}"] = column[chosen].contiguous()
    return found


def _with_heads(model: ModelIdentity, count: int) -> ModelIdentity:
    """What a rank sees of a model with `count` KV heads on it."""
    group = model.geometry.num_attention_heads // model.geometry.num_kv_heads
    geometry = model.geometry.model_copy(update={"num_kv_heads": count, "num_attention_heads": count * group})
    return model.model_copy(update={"geometry": geometry})
