"""VeloxQuant-MLX's `mapper.safetensors` + `manifest.json` (format_version 1).

Tensors `{layer}.w_k` `[heads, k * width, head_dim]`, `.b_k` `[heads, head_dim]`, and the same for v, float16
as a rule: every target head reads all source heads. Plain half-split RoPE only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from kvhub.artifact.manifest import Manifest
from kvhub.errors import Corrupt, Incompatible
from kvhub.interop.dense import (
    SIDES,
    Dense,
    demand,
    layers_of,
    number,
    read_json,
    read_tensors,
    theta,
    uniform,
)
from kvhub.interop.streaming import Made, write_safetensors
from kvhub.model.identity import ModelIdentity
from kvhub.strict_json import shown

NAME = "veloxquant"


def matches(directory: Path) -> bool:
    """Whether a directory looks like one."""
    return all((directory / name).exists() for name in ("manifest.json", "mapper.safetensors"))


def read(directory: Path, source: ModelIdentity, target: ModelIdentity) -> Dense:
    """Read and check against both models. Errors: `Corrupt`, `Incompatible`."""
    content = read_json(directory / "manifest.json")
    config, entries = content.get("config"), content.get("layers")
    if content.get("format_version") != 1 or not isinstance(config, dict) or not isinstance(entries, list):
        raise Corrupt("manifest.json is not a mapper manifest of format_version 1")
    if config.get("content_space") is not True:
        raise Incompatible("the mapper works on rotated keys", "ours work in content space", code="layout")
    for role, model in (("source", source), ("target", target)):
        said = content.get(role)
        if not isinstance(said, dict) or said.get("rope_scaling") or said.get("rope_traditional"):
            raise Corrupt(f"manifest.json does not describe its {role}")
        for key, wanted in (
            ("n_layers", model.geometry.num_layers),
            ("n_kv_heads", model.geometry.num_kv_heads),
            ("head_dim", model.geometry.head_dim),
        ):
            demand(said.get(key), wanted, key, role)
        demand(said.get("rope_theta"), theta(model), "rope_theta", role, "rope")
    entries = [entry if isinstance(entry, dict) else {} for entry in entries]
    if [entry.get("target_layer") for entry in entries] != list(range(len(entries))):
        raise Corrupt("manifest.json: target layers are not in order")
    layers = layers_of([entry.get("source_layers") for entry in entries], source, target, "manifest.json")
    rows, out = len(layers[0]) * source.geometry.features, target.geometry
    expected: dict[str, tuple[int, ...]] = {}
    for t in range(len(layers)):
        for side in SIDES:
            expected |= {
                f"{t}.w_{side}": (out.num_kv_heads, rows, out.head_dim),
                f"{t}.b_{side}": (out.num_kv_heads, out.head_dim),
            }
    tensors = read_tensors(directory / "mapper.safetensors", expected)
    keys = [(t, side) for t in range(len(layers)) for side in SIDES]
    names = [shown(content[role].get("model_type"), 64) for role in ("source", "target")]
    return Dense(
        NAME,
        " -> ".join(names),
        layers,
        number(config, "ridge_lambda", "manifest.json"),
        Made(keys, lambda key: tensors[f"{key[0]}.w_{key[1]}"].permute(1, 0, 2).reshape(rows, -1)),
        Made(keys, lambda key: tensors[f"{key[0]}.b_{key[1]}"].flatten()),
    )


def write(directory: Path, manifest: Manifest, dense: Dense) -> None:
    """The two files, in float32: their reader takes any dtype. Errors: `Incompatible`, before any write."""
    uniform(manifest)
    heads, size = manifest.target.geometry.num_kv_heads, manifest.target.geometry.head_dim
    rows = manifest.k * manifest.source.geometry.features
    shapes: dict[str, tuple[int, ...]] = {}
    for t, side in dense.weights:
        shapes |= {f"{t}.w_{side}": (heads, rows, size), f"{t}.b_{side}": (heads, size)}

    def make(name: str) -> Tensor:
        t, part, side = name.replace(".", "_").split("_")
        if part == "b":
            return dense.biases[int(t), side].view(heads, size)
        return dense.weights[int(t), side].view(rows, heads, size).permute(1, 0, 2)

    given = manifest.calibration
    r2 = [manifest.fit_scores.r2_key, manifest.fit_scores.r2_value]
    content = {
        "format_version": 1,
        "source": _spec(manifest.source),
        "target": _spec(manifest.target),
        "config": {
            "k": manifest.k,
            "ridge_lambda": manifest.regularization,
            "n_calib_sequences": given.sequences,
            "calib_seq_len": given.length,
            "stride": given.stride,
            "content_space": True,
            "dtype": "float32",
        },
        "layers": [
            {
                "target_layer": t,
                "source_layers": chosen,
                "r2_k": r2[0][t] if len(r2[0]) > t else 0.0,
                "r2_v": r2[1][t] if len(r2[1]) > t else 0.0,
            }
            for t, chosen in enumerate(manifest.source_layers)
        ],
    }
    (directory / "manifest.json").write_text(json.dumps(content, indent=2))
    write_safetensors(directory / "mapper.safetensors", shapes, make)


def _spec(model: ModelIdentity) -> dict[str, Any]:
    shape = model.geometry
    return {
        "n_layers": shape.num_layers,
        "n_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rope_theta": theta(model),
        "rope_traditional": False,
        "rope_scaling": None,
        "model_type": model.architecture,
    }
