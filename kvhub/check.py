"""Whether two models can form a pair and what a mapper between them costs, before anything is run.

From configs, weight headers and tokenizers alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvhub.errors import BadInput, Incompatible
from kvhub.fit.budget import memory_needed
from kvhub.fit.ridge import Support
from kvhub.fit.selection import demand_k
from kvhub.model.config import read_config
from kvhub.model.engine import not_served, served_otherwise
from kvhub.model.fingerprint import hub_snapshot, weights_revision
from kvhub.model.headers import TensorHeader
from kvhub.model.identify import describe
from kvhub.model.identity import Geometry, RopeSpec
from kvhub.model.remote import tensor_headers
from kvhub.model.resolve import resolve
from kvhub.model.rope import rope_spec
from kvhub.model.tokenizer import beyond, load_tokenizer, tokenizer_digest
from kvhub.strict_json import shown

DEFAULT_K = 8
"""Of a fit."""
ROWS_A_FEATURE = 4
"""Rows for each feature of a regression below which it extrapolates badly."""


@dataclass(frozen=True)
class Refused:
    """Why not: `where` is `source`, `target` or `pair`; `code` is stable."""

    where: str
    code: str
    message: str
    hint: str


@dataclass(frozen=True)
class Side:
    """One model as described by its files."""

    name: str
    revision: str
    architecture: str
    geometry: Geometry
    rope: RopeSpec
    weights_bytes: int
    layer_flops: int | None
    """Multiply-adds, times two, of all layers for one token; None for mixtures of experts."""


@dataclass(frozen=True)
class Cost:
    """Of one support (`full` or `head-local`) at the given k."""

    support: str
    features: int
    artifact_bytes: int
    """Weights in bfloat16, biases in float32."""
    map_flops: int
    """For one mapped token, all target layers, K and V."""
    rows_needed: int
    rows_advised: int


@dataclass(frozen=True)
class Check:
    """What `kvhub check` says; `possible` where nothing refuses."""

    k: int
    source: Side | None = None
    target: Side | None = None
    refusals: list[Refused] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    matched_heads: bool = False
    """Equal KV head counts: `head-local` support is possible."""
    fit_bytes: int = 0
    """Of a fit's moments and solves in main memory, beside the two models."""

    @property
    def possible(self) -> bool:
        return not self.refusals

    def record(self) -> dict[str, Any]:
        """For programs."""
        value: dict[str, Any] = {
            "possible": self.possible,
            "k": self.k,
            "refusals": [asdict(refused) for refused in self.refusals],
            "notes": self.notes,
            "matched_heads": self.matched_heads,
            "fit_bytes": self.fit_bytes,
            "costs": [asdict(cost) for cost in self.costs],
        }
        for where, side in (("source", self.source), ("target", self.target)):
            value[where] = side and {
                "name": side.name,
                "revision": side.revision,
                "architecture": side.architecture,
                "geometry": side.geometry.model_dump(),
                "rope_type": side.rope.rope_type,
                "context": side.rope.context,
                "weights_bytes": side.weights_bytes,
                "layer_flops": side.layer_flops,
                "kv_bytes_per_token": side.geometry.bytes_per_token(2),
            }
        return value


def check(source: str, target: str, *, k: int | None = None) -> Check:
    """Look at both models and say everything that speaks against the pair, and what it costs.

    source, target: a directory or `org/name[@revision]`; weights are not downloaded.
    k: None is the default of a fit, or all layers where the source has fewer.
    Errors: those of `resolve`; `Corrupt`, `NotFound` and `BadInput` for files that cannot be read, and
    `BadInput` for a k that the source has not. What is merely unsupported is returned, not raised.
    """
    paths = resolve(source, weights=False), resolve(target, weights=False)
    refusals: list[Refused] = []
    sides = [_side(where, path, refusals) for where, path in zip(("source", "target"), paths, strict=True)]
    notes = _compare_tokenizers(paths, refusals)
    one, other = sides
    for where, side in (("source", one), ("target", other)):
        if side is not None:
            notes += _notes(where, side)
    if one is None or other is None:
        return Check(k or DEFAULT_K, one, other, refusals, notes)
    k = min(DEFAULT_K, one.geometry.num_layers) if k is None else k
    demand_k(k, one.geometry)
    if one.revision == other.revision:
        notes.append("both are the same model: its cache can be used as it is, without a mapper")
    matched = one.geometry.num_kv_heads == other.geometry.num_kv_heads
    supports: tuple[Support, ...] = ("full", "head-local") if matched else ("full",)
    costs = [cost(one.geometry, other.geometry, k, support) for support in supports]
    needed = memory_needed(one.geometry, other.geometry, k=k, both=False)
    return Check(k, one, other, refusals, notes, costs, matched, needed)


def cost(source: Geometry, target: Geometry, k: int, support: Support) -> Cost:
    """What a mapper takes; a map multiplies each weight once a token."""
    features = k * (source.features if support == "full" else source.head_dim)
    biases = 2 * target.num_layers * target.features
    return Cost(
        support=support,
        features=features,
        artifact_bytes=2 * biases * features + 4 * biases,
        map_flops=2 * biases * features,
        rows_needed=features + 1,
        rows_advised=ROWS_A_FEATURE * features,
    )


def _side(where: str, path: Path, refusals: list[Refused]) -> Side | None:
    try:
        # The config first: what it rules out needs no header from the Hub.
        rope_spec(read_config(path).config, str(path))
        tensors = tensor_headers(path)
        architecture, shape, rope = describe(path, tensors)
    except Incompatible as error:
        refusals.append(Refused(where, error.code, error.message, error.hint))
        return None
    snapshot = hub_snapshot(path)
    return Side(
        name=shown(snapshot[0] if snapshot else path.name, 256),
        revision=weights_revision(path),
        architecture=architecture,
        geometry=shape,
        rope=rope,
        weights_bytes=sum(tensor.end - tensor.start for tensor in tensors.values()),
        layer_flops=_layer_flops(tensors),
    )


def _layer_flops(tensors: Mapping[str, TensorHeader]) -> int | None:
    if any(".experts." in name for name in tensors):
        return None
    matrices = (
        tensor.shape for name, tensor in tensors.items() if ".layers." in name and len(tensor.shape) == 2
    )
    return 2 * sum(math.prod(shape) for shape in matrices)


def _compare_tokenizers(paths: tuple[Path, Path], refusals: list[Refused]) -> list[str]:
    """Adds to `refusals`; returns notes."""
    try:
        one, other = (load_tokenizer(path) for path in paths)
    except BadInput:
        if refusals:
            return []  # what is refused anyway may be of a kind whose tokenizer nothing here can read
        raise
    if tokenizer_digest(one) == tokenizer_digest(other):
        return [] if refusals else _not_embedded(paths, one)
    first, second = ({index: token for token, index in each.get_vocab().items()} for each in (one, other))
    unlike = sum(first.get(index) != second.get(index) for index in first.keys() | second.keys())
    what = f"{unlike} of {max(len(first), len(second))} ids differ" if unlike else "special tokens differ"
    refusals.append(
        Refused(
            "pair",
            "tokenizer",
            f"the models have different vocabularies: {what}",
            "a cache can only be mapped where every token id means the same to both models",
        )
    )
    return []


def _not_embedded(paths: tuple[Path, Path], tokenizer: Any) -> list[str]:
    found = []
    for where, path in zip(("source", "target"), paths, strict=True):
        rows = read_config(path).config.vocab_size
        if count := beyond(tokenizer, rows):
            found.append(f"{where}: {count} tokens of the vocabulary have no row in its embedding ({rows});"
                         " text that has one is refused")  # fmt: skip
    return found


def _notes(where: str, side: Side) -> list[str]:
    notes = []
    if side.rope.limit is not None:
        notes.append(
            f"{where}: {side.rope.rope_type} RoPE is exact below position {side.rope.limit};"
            " longer prefixes are refused"
        )
    reason = not_served(side.architecture) or served_otherwise(side.rope)
    if reason:
        notes.append(f"{where}: not for serving with SGLang: {reason}")
    return notes
