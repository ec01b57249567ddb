"""kvtransfer's `mapper.safetensors` + `mapper.json` (format `kvtransfer.mapper.v1`).

Tensors `K.W.{l}` `[k * width, width]`, `K.b.{l}`, `V.W.{l}`, `V.b.{l}`; source layers best first.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from kvhub.artifact.manifest import Manifest
from kvhub.errors import Corrupt, Incompatible
from kvhub.interop.dense import SIDES, Dense, demand, layers_of, number, read_json, read_tensors
from kvhub.interop.streaming import Made, write_safetensors
from kvhub.model.identity import ModelIdentity
from kvhub.strict_json import shown

NAME = "kvtransfer"
FORMAT = "kvtransfer.mapper.v1"


def matches(directory: Path) -> bool:
    """Whether a directory looks like one."""
    return all((directory / name).exists() for name in ("mapper.json", "mapper.safetensors"))


def read(directory: Path, source: ModelIdentity, target: ModelIdentity) -> Dense:
    """Read and check against both models. Errors: `Corrupt`, `Incompatible`."""
    content = read_json(directory / "mapper.json")
    if content.get("format") != FORMAT:
        raise Corrupt(f"mapper.json is not of format {FORMAT}")
    if content.get("key_space", "content") != "content":
        raise Incompatible("the mapper works on rotated keys", "ours work in content space", code="layout")
    for role, model in (("source", source), ("target", target)):
        said = content.get(role)
        if not isinstance(said, dict):
            raise Corrupt(f"mapper.json does not describe its {role}")
        for key, wanted in (
            ("n_layers", model.geometry.num_layers),
            ("n_kv", model.geometry.num_kv_heads),
            ("head_dim", model.geometry.head_dim),
        ):
            demand(said.get(key), wanted, key, role)
        base = model.rope.parameters.get("rope_theta")
        if isinstance(base, int | float):
            demand(said.get("rope_theta"), float(base), "rope_theta", role, "rope")
    layers = layers_of(content.get("selected"), source, target, "mapper.json")
    rows, columns = len(layers[0]) * source.geometry.features, target.geometry.features
    expected: dict[str, tuple[int, ...]] = {}
    for t in range(len(layers)):
        for side in ("K", "V"):
            expected |= {f"{side}.W.{t}": (rows, columns), f"{side}.b.{t}": (columns,)}
    tensors = read_tensors(directory / "mapper.safetensors", expected)
    keys = [(t, side) for t in range(len(layers)) for side in SIDES]
    return Dense(
        NAME,
        shown(f"{content['source'].get('name')} -> {content['target'].get('name')}", 200),
        layers,
        number(content, "lam", "mapper.json"),
        Made(keys, lambda key: tensors[f"{key[1].upper()}.W.{key[0]}"]),
        Made(keys, lambda key: tensors[f"{key[1].upper()}.b.{key[0]}"]),
    )


def write(directory: Path, manifest: Manifest, dense: Dense) -> None:
    """The two files. Errors: `Incompatible` for what the layout cannot say, before anything is written."""
    rows, columns = manifest.k * manifest.source.geometry.features, manifest.target.geometry.features
    names: dict[str, tuple[str, tuple[int, str]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for t, side in dense.weights:
        for part, shape in (("W", (rows, columns)), ("b", (columns,))):
            name = f"{side.upper()}.{part}.{t}"
            names[name], shapes[name] = (part, (t, side)), shape
    content = {
        "format": FORMAT,
        "paper": "arXiv:2608.03893",
        "source": _spec(manifest.source),
        "target": _spec(manifest.target),
        "k": manifest.k,
        "lam": manifest.regularization,
        "key_space": "content",
        "selected": manifest.source_layers,
        "fit_r2": {"K": manifest.fit_scores.r2_key, "V": manifest.fit_scores.r2_value},
        "n_params": sum(math.prod(shape) for shape in shapes.values()),
        "meta": {"kvhub_digest": manifest.digest},
    }
    (directory / "mapper.json").write_text(json.dumps(content, indent=2))

    def make(name: str) -> Tensor:
        part, key = names[name]
        return dense.weights[key] if part == "W" else dense.biases[key]

    write_safetensors(directory / "mapper.safetensors", shapes, make)


def _spec(model: ModelIdentity) -> dict[str, Any]:
    shape, base = model.geometry, model.rope.parameters.get("rope_theta")
    if not isinstance(base, int | float):
        raise Incompatible(f"{model.name} has no rope_theta, which this layout needs", code="rope")
    return {
        "name": model.name,
        "n_layers": shape.num_layers,
        "n_kv": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rope_theta": float(base),
        "attention_scaling": model.rope.attention_factor,
    }
