"""The same mapper with int8 weights and a scale for every column: another artifact, with a digest of its own.

Evidence is bound to a digest, so what computes caches is what was evaluated: nothing is quantised on loading.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from kvhub.artifact.manifest import Manifest
from kvhub.artifact.write import write_artifact
from kvhub.catalog import register
from kvhub.errors import BadInput, Incompatible
from kvhub.mapper.base import Mapper
from kvhub.mapper.load import load_mapper
from kvhub.mapper.ridge import RidgeMapper
from kvhub.settings import Settings
from kvhub.store.add import add


def quantized(mapper: Mapper) -> tuple[Manifest, dict[str, Tensor]]:
    """Manifest (without files) and tensors of `mapper` in int8: a column's largest weight becomes 127.

    Errors: `Incompatible(code="family")` but for the ridge family; `BadInput` where it is int8 already.
    """
    manifest = mapper.manifest
    if not isinstance(mapper, RidgeMapper):
        raise Incompatible(f"{manifest.family} mappers have no int8 form", code="family")
    if manifest.weights_dtype == "int8":
        raise BadInput(f"mapper {manifest.digest[:12]} has int8 weights already")
    tensors: dict[str, Tensor] = {}
    target = manifest.target.geometry
    column = (target.num_kv_heads, target.head_dim)
    local = manifest.support == "head-local"
    for layer, sides in enumerate(mapper.weights().quantized().sides):
        for side, affine in zip("kv", sides, strict=True):
            assert affine.scale is not None
            prefix = f"layers.{layer}.{side}"
            tensors[f"{prefix}.weight"] = affine.weight if local else affine.weight[0]
            tensors[f"{prefix}.scale"] = affine.scale.reshape(column)
            tensors[f"{prefix}.bias"] = affine.bias.reshape(column)
        norm = mapper.norm(layer)
        if norm is not None:
            tensors[f"layers.{layer}.k.norm"] = norm
    return manifest.model_copy(update={"weights_dtype": "int8", "files": []}), tensors


def quantize(ref: str | Path, output: Path | None = None) -> tuple[Path, Manifest]:
    """Write the int8 form of `ref` (directory, digest, alias, `org/name`) and register it as a draft.

    output: a new directory; None: `KVHUB_HOME/mappers/<digest>`. Errors: those of `load_mapper`, `quantized`
    and `write_artifact`.
    """
    manifest, tensors = quantized(load_mapper(ref))
    settings = Settings.load()
    if output is not None:
        written = write_artifact(output, manifest, tensors)
        register(output.absolute(), written, settings)
        return output.absolute(), written
    return add(manifest, tensors, settings, tag=f"quantize-{manifest.digest[:16]}")
