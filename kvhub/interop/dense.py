"""What all layouts share: per target layer a dense matrix for K and for V, and the source layers it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvhub.artifact.manifest import Manifest
from kvhub.errors import Corrupt, Incompatible
from kvhub.interop.streaming import Made, read_tensor
from kvhub.model.headers import read_header
from kvhub.model.identity import ModelIdentity
from kvhub.strict_json import parse_object, read_bounded, shown

SIDES = ("k", "v")
DTYPES = {"F32", "F16", "BF16"}
JSON_LIMIT = 64 << 20


@dataclass(frozen=True)
class Dense:
    """A mapper without a layout: `out = x @ weight + bias` in content space.

    source_layers: per target layer, in the order of the blocks of rows. weights: `[k * F_s, F_t]`,
    biases: `[F_t]`, by target layer and side; float32. F is a layer's width, heads times head size,
    head by head. Both mappings may make a tensor whenever it is asked for.
    """

    layout: str
    name: str
    source_layers: list[list[int]]
    strength: float
    weights: Mapping[tuple[int, str], Tensor]
    biases: Mapping[tuple[int, str], Tensor]
    notes: list[str] = field(default_factory=list)

    def ascending(self) -> Dense:
        """The same map with every list of source layers in ascending order, as our manifest wants it."""

        def ordered(key: tuple[int, str]) -> Tensor:
            chosen, weight = self.source_layers[key[0]], self.weights[key]
            blocks = weight.view(len(chosen), -1, weight.shape[1])
            order = sorted(range(len(chosen)), key=chosen.__getitem__)
            return blocks[order].reshape(weight.shape)

        layers = [sorted(chosen) for chosen in self.source_layers]
        weights = Made(self.weights, ordered)
        return Dense(self.layout, self.name, layers, self.strength, weights, self.biases, self.notes)


def from_artifact(manifest: Manifest, tensors: Mapping[str, Tensor]) -> Dense:
    """One of ours; a head-local mapper becomes block-diagonal, which maps the same."""
    source = manifest.source.geometry

    def weight(key: tuple[int, str]) -> Tensor:
        stored = tensors[f"layers.{key[0]}.{key[1]}.weight"].float()
        return _spread(stored, manifest.k, source.head_dim) if manifest.support == "head-local" else stored

    def bias(key: tuple[int, str]) -> Tensor:
        return tensors[f"layers.{key[0]}.{key[1]}.bias"].float().flatten()

    keys = [(layer, side) for layer in range(manifest.target.geometry.num_layers) for side in SIDES]
    weights, biases = Made(keys, weight), Made(keys, bias)
    return Dense("kvhub", manifest.digest, manifest.source_layers, manifest.regularization, weights, biases)


def _spread(weight: Tensor, k: int, dim: int) -> Tensor:
    """`[H, k * D_s, D_t]` -> `[k * H * D_s, H * D_t]`, zero between different heads."""
    heads, _, out = weight.shape
    full = torch.zeros(k, heads, dim, heads, out, dtype=weight.dtype)
    for head in range(heads):
        full[:, head, :, head, :] = weight[head].view(k, dim, out)
    return full.view(k * heads * dim, heads * out)


def read_json(path: Path) -> dict[str, Any]:
    """A foreign manifest: bounded, no symlink, no duplicate keys. Errors: `NotFound`, `Corrupt`."""
    return parse_object(read_bounded(path, limit=JSON_LIMIT), path.name)


def read_tensors(path: Path, expected: Mapping[str, tuple[int, ...]]) -> Made[str]:
    """Exactly the expected tensors, float32 and finite; the header is checked before anything is mapped.

    Each is read, and its values checked, when it is asked for. Errors (also then): `NotFound`, `Corrupt`.
    """
    if path.is_symlink():
        raise Corrupt(f"{path.name} is a symlink")
    header = read_header(path)
    if set(header) != set(expected):
        wrong = min(set(header) ^ set(expected))
        raise Corrupt(
            f"{path.name}: tensor {shown(wrong, 80)!r} is {'missing' if wrong in expected else 'extra'}"
        )
    for name, entry in header.items():
        if entry.shape != tuple(expected[name]) or entry.dtype not in DTYPES:
            raise Corrupt(
                f"{path.name}: {name!r} is {entry.dtype} {list(entry.shape)}, not {list(expected[name])}"
            )

    def read(name: str) -> Tensor:
        tensor = read_tensor(path, name).to(torch.float32)
        if not bool(torch.isfinite(tensor).all()):
            raise Corrupt(f"{path.name}: {name!r} has NaN or infinite values")
        return tensor

    return Made(expected, read)


def layers_of(value: Any, source: ModelIdentity, target: ModelIdentity, where: str) -> list[list[int]]:
    """A list of source layers for each target layer: same length, distinct, in range. Errors: `Corrupt`."""
    good = (
        isinstance(value, list)
        and len(value) == target.geometry.num_layers
        and all(isinstance(chosen, list) and chosen and len(chosen) == len(value[0]) for chosen in value)
        and all(type(layer) is int and 0 <= layer < source.geometry.num_layers for c in value for layer in c)
        and all(len(set(chosen)) == len(chosen) for chosen in value)
    )
    if not good:
        raise Corrupt(f"{where}: the selected source layers do not fit these two models")
    return [list(chosen) for chosen in value]


def number(content: Mapping[str, Any], key: str, where: str) -> float:
    """A finite number. Errors: `Corrupt`."""
    value = content.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e300:
        raise Corrupt(f"{where}: {key} is not a number")
    return float(value)


def demand(found: Any, wanted: Any, what: str, role: str, code: str = "geometry") -> None:
    """Refuse a mapper whose own words do not fit the model. Errors: `Incompatible`."""
    if found != wanted:
        raise Incompatible(
            f"the mapper's {role} has {what} {shown(found, 48)}, this model {shown(wanted, 48)}",
            "give the two models that it was fitted on",
            code=code,
        )


def theta(model: ModelIdentity) -> float:
    """The RoPE base of a plain, half-split rotation. Errors: `Incompatible(code="rope")`."""
    value = model.rope.parameters.get("rope_theta")
    if (
        model.rope.rope_type != "default"
        or model.rope.pairing != "half"
        or not isinstance(value, int | float)
    ):
        raise Incompatible(
            f"{model.name} uses {model.rope.rope_type} RoPE, which this layout cannot say", code="rope"
        )
    return float(value)


def uniform(manifest: Manifest) -> None:
    """Refuse what layouts with one head count and one head size cannot say. Errors: `Incompatible`."""
    one, two = manifest.source.geometry, manifest.target.geometry
    if (one.num_kv_heads, one.head_dim) != (two.num_kv_heads, two.head_dim):
        raise Incompatible("this layout needs equal KV heads and head sizes on both sides", code="geometry")
