"""What a set of models would need: every ordered pair's storage, and the memory and work of its fit.

Formulas from arXiv 2608.03893 (section 3 and appendix D): a full mapper has `2 * L_t * F_t * (k * F_s + 1)`
parameters, with F the width of one layer's K; the moments of one pass over all source layers take
`8 * F (F + G)` bytes in float64 for K and again for V, F and G being the widths of all layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvhub.errors import BadInput, Corrupt, NotFound
from kvhub.strict_json import parse_object, read_bounded
from kvhub_registry import MapperRow, ModelRecord
from kvhub_registry.names import answers_to

ROWS = 500 * 1024 // 4
"""Token positions of the paper's calibration set."""


@dataclass(frozen=True)
class Shape:
    """A model's cache."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Of one layer's K."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Need:
    """One ordered pair: bytes on disk, bytes of moments, floating-point operations of the Gram matrices."""

    source: Shape
    target: Shape
    k: int
    parameters: int
    size: int
    moments: int
    operations: int
    existing: MapperRow | None
    note: str = ""


def shape_of(ref: str, rows: Sequence[MapperRow]) -> Shape:
    """A model by directory, by name in the registry, or by its config.json on the Hub.

    Errors: `NotFound`, `Corrupt`, `BadInput` for a name that several models answer to, and the client's.
    """
    directory = Path(ref).expanduser()
    if directory.is_dir():
        return _from_config(directory.absolute().name, directory / "config.json")
    what = "a model is a directory with config.json, a name that the registry knows, or org/name"
    if directory.exists():
        raise BadInput(f"{ref} is a file", what)
    if ref.startswith((".", "/", "~")):
        raise NotFound(f"there is no {ref}", what)
    found: dict[str, Shape] = {}
    for row in rows:
        for model in (row.source, row.target):
            if answers_to(model.name, ref):
                found.setdefault(model.name.casefold(), _shape(model))
    if len(found) > 1:
        names = " and ".join(sorted(shape.name for shape in found.values())[:3])
        raise BadInput(f"{ref!r} is the name of several models here: {names}", "give a directory or org/name")
    if found:
        return next(iter(found.values()))
    if "/" not in ref:
        raise NotFound(f"no model {ref!r} here", "a directory, a name that the registry knows, or org/name")
    from kvhub.hub import bounds, client

    repo_id, revision = client.split(ref)
    hub = client.api()
    with bounds.task(repo_id, one_page=True):  # the client's own attempts would come on top of ours
        config = client.ask(repo_id, lambda: hub.hf_hub_download(repo_id, "config.json", revision=revision))
    return _from_config(ref, Path(config))


def plan(
    shapes: Sequence[Shape], rows: Sequence[MapperRow], *, k: int, support: str = "full", itemsize: int = 2
) -> list[Need]:
    """Every ordered pair of `shapes`, each of which counts once. k: source layers per target layer.

    Errors: `BadInput`.
    """
    once: dict[str, Shape] = {}
    for shape in shapes:
        first = once.setdefault(shape.name.casefold(), shape)
        if first != replace(shape, name=first.name):
            raise BadInput(
                f"two models of different shapes are both called {shape.name}",
                "rename one of the directories",
            )
    shapes = list(once.values())
    if len(shapes) < 2:
        raise BadInput("a plan needs two models at least", "kvhub plan MODEL MODEL")
    return [_need(s, t, rows, k, support, itemsize) for s in shapes for t in shapes if s is not t]


def _need(
    source: Shape, target: Shape, rows: Sequence[MapperRow], k: int, support: str, itemsize: int
) -> Need:
    used, note = min(k, source.num_layers), ""
    inputs = used * source.width
    if support == "head-local":
        if source.num_kv_heads == target.num_kv_heads:
            inputs = used * source.head_dim
        else:
            note = "head counts differ: full"
    weights = 2 * target.num_layers * inputs * target.width
    biases = 2 * target.num_layers * target.width
    f, g = source.num_layers * source.width, target.num_layers * target.width
    existing = [row for row in rows if _is(row.source, source) and _is(row.target, target)]
    existing.sort(key=lambda row: (row.state.value != "ready", -row.created.timestamp()))
    return Need(
        source,
        target,
        used,
        weights + biases,
        weights * itemsize + biases * 4,
        2 * 8 * f * (f + g),
        2 * 2 * ROWS * f * (f + g),
        existing[0] if existing else None,
        note,
    )


def _is(model: ModelRecord, shape: Shape) -> bool:
    """Whether a registered model may be this one: by name, and not of another shape."""
    return answers_to(model.name, shape.name) and replace(_shape(model), name=shape.name) == shape


def _shape(model: ModelRecord) -> Shape:
    return Shape(model.name, model.num_layers, model.num_kv_heads, model.head_dim)


def _from_config(name: str, path: Path) -> Shape:
    config = parse_object(read_bounded(path, limit=4 << 20, follow_symlinks=True), path.name)
    heads = config.get("num_attention_heads")
    values: dict[str, Any] = {
        "num_layers": config.get("num_hidden_layers"),
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim"),
    }
    hidden = config.get("hidden_size")
    if values["head_dim"] is None and type(hidden) is int and type(heads) is int and heads > 0:
        values["head_dim"] = hidden // heads
    for key, value in values.items():
        if type(value) is not int or not 1 <= value <= 1 << 16:
            raise Corrupt(
                f"{path.name} of {name} has no usable {key}", "kvhub plan needs a causal language model"
            )
    return Shape(name, **values)
