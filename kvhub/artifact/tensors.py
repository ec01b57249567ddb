"""Which tensors a mapper of each family has, computed from its manifest alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from kvhub.artifact.manifest import NORMALISED, Manifest
from kvhub.errors import Corrupt, Incompatible

Shape = tuple[int, ...]

ITEMSIZE = {"float32": 4, "bfloat16": 2, "int8": 1}

MLP_PARTS = ("hidden1.", "hidden2.", "")
"""What stands before `weight` and `bias` of an `mlp` mapper's dense layers, from the input on."""


def expected_tensors(manifest: Manifest) -> dict[str, Shape]:
    """Name and shape of every tensor, in order of target layer; `out = x @ weight + bias`.

    `full`: `layers.{t}.{k,v}.weight` `[k * H_s * D_s, H_t * D_t]`, rows ordered by selected source
    layer (ascending), head, dimension. `head-local`: `[H_t, k * D_s, D_t]`, target head h reading
    source head h. Both: `layers.{t}.{k,v}.bias` `[H_t, D_t]`. With int8 weights also
    `layers.{t}.{k,v}.scale` `[H_t, D_t]`, and `out = (x @ weight) * scale + bias`. Family `ridge-k-norm` has
    `layers.{t}.k.norm` `[D_t]` too, the weight of the target's k_norm: `norm * out / rms(out)`, head by head.

    Family `mlp`, with g networks a layer (1, or one a target head) of p inputs (as above) and c outputs:
    `layers.{t}.{k,v}.hidden1.weight` `[g, p, a]`, `.hidden1.bias` `[g, a]`, `.hidden2.weight` `[g, a, b]`,
    `.hidden2.bias` `[g, b]`, `.weight` `[g, b, c]`, `.bias` `[g, c]`; ReLU after the hidden layers.
    Errors: `Incompatible(code="family")` for a family that this version does not know, `Corrupt`.
    """
    shapes = FAMILIES.get(manifest.family)
    if shapes is None:
        known = ", ".join(sorted(FAMILIES))
        raise Incompatible(
            f"mappers of family {manifest.family!r} are not known to this version of kvhub",
            f"upgrade kvhub; known: {known}",
            code="family",
        )
    heads = manifest.source.geometry.num_kv_heads, manifest.target.geometry.num_kv_heads
    if manifest.support == "head-local" and heads[0] != heads[1]:
        raise Corrupt("a head-local mapper needs as many source heads as target heads")
    return shapes(manifest)


def stored_dtype(name: str, manifest: Manifest) -> Literal["float32", "bfloat16", "int8"]:
    """What tensor `name` is stored in: weights as the manifest says, biases and scales always float32.

    A key bias may be a hundred times the spread of its rows: rounded to bfloat16 it was off by
    half a standard deviation in a real model.
    """
    return manifest.weights_dtype if name.endswith(".weight") else "float32"


def stored_bytes(name: str, shape: Shape, manifest: Manifest) -> int:
    """Bytes of one tensor on disk."""
    return ITEMSIZE[stored_dtype(name, manifest)] * math.prod(shape)


def tensor_bytes(manifest: Manifest) -> int:
    """Bytes that all tensors together take, by geometry."""
    return sum(stored_bytes(name, shape, manifest) for name, shape in expected_tensors(manifest).items())


def _ridge(manifest: Manifest) -> dict[str, Shape]:
    source, target = manifest.source.geometry, manifest.target.geometry
    if manifest.support == "head-local":
        weight: Shape = (target.num_kv_heads, manifest.k * source.head_dim, target.head_dim)
    else:
        weight = (manifest.k * source.features, target.features)
    column: Shape = (target.num_kv_heads, target.head_dim)
    parts = [("weight", weight), ("scale", column), ("bias", column), ("norm", (target.head_dim,))]
    absent = {
        *(() if manifest.weights_dtype == "int8" else ("k.scale", "v.scale")),
        *(() if manifest.normalised else ("k.norm",)),
        "v.norm",
    }
    return {
        f"layers.{layer}.{side}.{part}": shape
        for layer in range(target.num_layers)
        for side in ("k", "v")
        for part, shape in parts
        if f"{side}.{part}" not in absent
    }


def _mlp(manifest: Manifest) -> dict[str, Shape]:
    source, target = manifest.source.geometry, manifest.target.geometry
    shape = manifest.perceptron
    if shape is None:
        raise Corrupt("an mlp mapper needs the widths of its hidden layers")
    local = manifest.support == "head-local"
    groups = target.num_kv_heads if shape.per == "head" else 1
    inputs = manifest.k * (source.head_dim if local else source.features)
    widths = (inputs, *shape.hidden, target.features // groups)
    found: dict[str, Shape] = {}
    for layer in range(target.num_layers):
        for side in ("k", "v"):
            for part, a, b in zip(MLP_PARTS, widths, widths[1:], strict=False):
                found[f"layers.{layer}.{side}.{part}weight"] = (groups, a, b)
                found[f"layers.{layer}.{side}.{part}bias"] = (groups, b)
    return found


FAMILIES: dict[str, Callable[[Manifest], dict[str, Shape]]] = {
    "mlp": _mlp,
    "ridge": _ridge,
    NORMALISED: _ridge,
}
