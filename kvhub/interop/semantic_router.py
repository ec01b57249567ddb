"""vLLM semantic-router's kv_mapper: `manifest.json`, `weights.safetensors`, `SHA256SUMS`.

Tensors `target.{layer}.{k|v}.W` `[topk * width, width]` and `.b` `[width]`, float32; only `full_head` is
fitted there. Its ridge strength is added to the raw Gram, not to a mean.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from kvhub.artifact.manifest import Manifest
from kvhub.errors import Corrupt, Incompatible
from kvhub.interop.dense import SIDES, Dense, demand, layers_of, number, read_json, read_tensors, uniform
from kvhub.interop.streaming import Made, write_safetensors
from kvhub.model.identity import ModelIdentity
from kvhub.strict_json import read_bounded, shown

NAME = "semantic-router"
FILES = ("manifest.json", "weights.safetensors", "SHA256SUMS")
PRECISION = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def matches(directory: Path) -> bool:
    """Whether a directory looks like one."""
    return all((directory / name).exists() for name in FILES)


def read(directory: Path, source: ModelIdentity, target: ModelIdentity) -> Dense:
    """Read and check against checksums and against both models. Errors: `Corrupt`, `Incompatible`."""
    _check_sums(directory)
    content = read_json(directory / "manifest.json")
    fitted = content.get("compatibility")
    if content.get("schema_version") != 1 or not isinstance(fitted, dict):
        raise Corrupt("manifest.json is not a kv_mapper manifest of schema 1")
    if fitted.get("variant") != "full_head" or (fitted.get("source_tp"), fitted.get("target_tp")) != (1, 1):
        raise Incompatible("only full_head mappers of one tensor-parallel rank are read", code="layout")
    if content.get("rope_stripped_on_keys") is not True:
        raise Incompatible("the mapper works on rotated keys", "ours work in content space", code="layout")
    for role, model in (("source", source), ("target", target)):
        demand(fitted.get("num_kv_heads"), model.geometry.num_kv_heads, "KV heads", role)
        demand(fitted.get("head_dim"), model.geometry.head_dim, "head size", role)
        kind, _, revision = model.revision.partition(":")
        if kind == "commit":
            demand(fitted.get(f"{role}_revision"), revision, "revision", role, f"{role}_identity")
    lists = content.get("source_layers_per_target")
    if (
        not isinstance(lists, dict)
        or lists.get("k") != lists.get("v")
        or not isinstance(lists.get("k"), dict)
    ):
        raise Corrupt("manifest.json: K and V must share one list of source layers")
    table = lists["k"]
    if set(table) != {str(t) for t in range(target.geometry.num_layers)}:
        raise Corrupt("manifest.json: there must be one list of source layers for each target layer")
    layers = layers_of([table[str(t)] for t in range(len(table))], source, target, "manifest.json")
    if content.get("topk") != len(layers[0]):
        raise Corrupt("manifest.json: topk is not the number of source layers")
    rows, columns = len(layers[0]) * source.geometry.features, target.geometry.features
    expected: dict[str, tuple[int, ...]] = {}
    for t in range(len(layers)):
        for side in SIDES:
            expected |= {f"target.{t}.{side}.W": (rows, columns), f"target.{t}.{side}.b": (columns,)}
    tensors = read_tensors(directory / "weights.safetensors", expected)
    keys = [(t, side) for t in range(len(layers)) for side in SIDES]
    return Dense(
        NAME,
        shown(content.get("mapper_id"), 200),
        layers,
        number(content, "ridge_alpha", "manifest.json"),
        Made(keys, lambda key: tensors[f"target.{key[0]}.{key[1]}.W"]),
        Made(keys, lambda key: tensors[f"target.{key[0]}.{key[1]}.b"]),
    )


def write(directory: Path, manifest: Manifest, dense: Dense) -> None:
    """The three files. Errors: `Incompatible` for what the layout cannot say, before anything is written."""
    uniform(manifest)
    rows, columns = manifest.k * manifest.source.geometry.features, manifest.target.geometry.features
    shapes: dict[str, tuple[int, ...]] = {}
    for t, side in dense.weights:
        shapes |= {f"target.{t}.{side}.W": (rows, columns), f"target.{t}.{side}.b": (columns,)}

    def make(name: str) -> Tensor:
        _, t, side, part = name.split(".")
        return (dense.weights if part == "W" else dense.biases)[int(t), side]

    text = json.dumps(_manifest(manifest), indent=2, sort_keys=True) + "\n"
    (directory / "manifest.json").write_text(text)
    write_safetensors(directory / "weights.safetensors", shapes, make)
    sums = []
    for name in FILES[:2]:
        with (directory / name).open("rb") as file:
            sums.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    (directory / "SHA256SUMS").write_text("".join(sums))


def _manifest(manifest: Manifest) -> dict[str, Any]:
    shape = manifest.source.geometry
    revisions = [model.revision.partition(":")[2] for model in (manifest.source, manifest.target)]
    precision = PRECISION[manifest.target.dtype]
    pair = "-to-".join(_slug(model.name) for model in (manifest.source, manifest.target))
    layers = {str(t): chosen for t, chosen in enumerate(manifest.source_layers)}
    given = manifest.calibration
    return {
        "schema_version": 1,
        "mapper_id": f"{pair}-full_head-{precision}-tp1-h{shape.num_kv_heads}"
        f"-s{revisions[0][-12:]}-t{revisions[1][-12:]}-b1",
        "compatibility": {
            "source_model": manifest.source.name,
            "source_revision": revisions[0],
            "target_model": manifest.target.name,
            "target_revision": revisions[1],
            "variant": "full_head",
            "precision": precision,
            "source_tp": 1,
            "target_tp": 1,
            "head_order": "contiguous",
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
        },
        "topk": manifest.k,
        "ridge_alpha": manifest.regularization,
        "centered_inputs": True,
        "rope_stripped_on_keys": True,
        "source_layers_per_target": {"k": layers, "v": layers},
        "calibration": {"dataset": given.dataset, "tokens": given.tokens, "kvhub_digest": manifest.digest},
        "evaluation_report": None,
    }


def _check_sums(directory: Path) -> None:
    """Both checksum lines, each once, and nothing else."""
    found: dict[str, str] = {}
    for line in read_bounded(directory / "SHA256SUMS", limit=1 << 16).decode("utf-8", "replace").splitlines():
        match = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](manifest\.json|weights\.safetensors)", line)
        if match is None or match[2] in found:
            raise Corrupt(f"SHA256SUMS: {shown(line, 80)!r} does not belong there")
        found[match[2]] = match[1].lower()
    if set(found) != set(FILES[:2]):
        raise Corrupt("SHA256SUMS does not list both files")
    for name, digest in found.items():
        if (directory / name).is_symlink():
            raise Corrupt(f"{name} is a symlink")
        with (directory / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise Corrupt(f"{name} was changed: its sha256 is not that of SHA256SUMS")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", name.rpartition("/")[2].lower()) or "model"
