"""`manifest.json`: what a mapper is. Its sha256 is the mapper's digest."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvhub.model.identity import (
    HIGHEST,
    MOST,
    R2,
    Cosine,
    Count,
    ModelIdentity,
    Positive,
    Real,
    Record,
    Seed,
    Sha256,
    Share,
    Strength,
    Text,
    Whole,
    canonical_json,
)

SCHEMA_VERSION = 1

NORMALISED = "ridge-k-norm"
"""The family whose mapped keys go through the target's own k_norm; else as `ridge`. A family and not a field:
a reader that does not know it says so, by name, where an unknown field would look like damage."""

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


class FileEntry(Record):
    """One file of the artifact, `size` in bytes."""

    name: FileName
    sha256: Sha256
    size: int = Field(ge=0, le=1 << 40)


class Calibration(Record):
    """The text a mapper was fitted on."""

    dataset: Text
    revision: Text | None
    sequences: Positive
    length: Positive
    stride: Positive
    tokens: Positive
    rows: Positive
    """Token positions that entered the moments."""
    digest: Sha256
    """sha256 over the exact token ids, in order (little-endian int64, windows length-prefixed)."""


class FitScores(Record):
    """R2 on the held-out calibration windows; a description, never a gate."""

    rows: Positive
    r2_key: list[R2]
    """Per target layer."""
    r2_value: list[R2]


class CurvePoint(Record):
    """One candidate on the tuning windows: the target on mapped caches, as it would be stored."""

    k: Positive
    regularization: Strength
    attention_cosine: Cosine
    """Mean over layers, heads and queries (arXiv 2608.03893, section 4)."""
    attention_cosine_worst: Cosine
    """Of the worst layer."""
    kl: Real
    """KL(native || mapped), nat a token."""
    top1: Share
    recipe: Text | None = None
    """What else the candidate differs in, where a search went over more than k and lambda."""


class Selection(Record):
    """How k and lambda were chosen: every candidate, on text that was neither fitted on nor held out."""

    k: Positive
    regularization: Strength
    windows: Positive
    tail: int = Field(ge=2, le=MOST)
    digest: Sha256
    """sha256 over the tuning windows' token ids."""
    curve: list[CurvePoint] = Field(max_length=1024)


class Perceptron(Record):
    """The networks of a mapper of the `mlp` family."""

    hidden: list[Annotated[int, Field(ge=1, le=65536)]] = Field(min_length=2, max_length=2)
    """Widths of the hidden layers."""
    per: Literal["head", "layer"]
    """One network a target head, as in arXiv 2608.03893, or one for all heads of a layer."""


class Training(Record):
    """What gradient steps made of the mapper, after the closed form or without one."""

    objective: Text
    steps: Positive
    rate: float = Field(gt=0, le=HIGHEST)
    """Peak learning rate."""
    batch: Positive
    """Windows (or rows, for the `mlp` family) a step."""
    seed: Seed
    tail: Count
    """Tokens that the target reads on the mapped cache; 0: the target is not run."""
    before: Real | None = None
    """The objective on the tuning windows at the start; None: there were none."""
    after: Real | None = None
    """And of what was kept."""
    curve: list[Real] = Field(max_length=256)
    """The objective while training: means over equal parts of the steps, in order."""


class Manifest(Record):
    """A fitted, directed mapper `source -> target`.

    `regularization` is relative: lambda = value * mean(diag(Gram)); with
    `regularization_convention = "absolute-mean"` it is `Gram/N + value * I`
    (arXiv 2608.03893, eq. 4, read per token).

    The bytes are the identity, so a field added to schema 1 must be left out of
    `to_bytes` at its default, or every older mapper would change its digest.
    """

    schema_version: Literal[1] = 1
    kvhub_version: Text
    family: str = Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")
    support: Literal["full", "head-local"]
    source: ModelIdentity
    target: ModelIdentity
    k: Positive
    regularization: Strength
    regularization_convention: Literal["relative-mean-diagonal", "absolute-mean"]
    objective: Text
    source_layers: list[list[Whole]]
    """`source_layers[target_layer]`: the k source layers it is mapped from, ascending."""
    exact_prefix: int = Field(ge=0, le=65536)
    """Positions left out of the fit, which the target must hold natively."""
    weights_dtype: Literal["float32", "bfloat16", "int8"]
    """Of the weights; biases are always float32 (they are few, and may be a hundred times a row's spread).
    int8: whole numbers and a float32 scale for every column, the `ridge` families only."""
    calibration: Calibration
    fit_scores: FitScores
    selection: Selection | None = None
    """Where k, lambda or more was chosen by kvhub; left out of the bytes where not."""
    recipe: Text | None = None
    """The named recipe, and what it came to; left out of the bytes where none was asked for."""
    perceptron: Perceptron | None = None
    """Family `mlp` only; left out of the bytes elsewhere."""
    training: Training | None = None
    """Where gradients were used; left out of the bytes elsewhere."""
    created: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)$")
    """ISO 8601, UTC."""
    files: list[FileEntry]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        layers = self.source.geometry.num_layers
        if len(self.source_layers) != self.target.geometry.num_layers:
            raise ValueError("source_layers must have one list per target layer")
        for chosen in self.source_layers:
            if len(chosen) != self.k or sorted(set(chosen)) != chosen:
                raise ValueError("each target layer needs k ascending, distinct source layers")
            if chosen[0] < 0 or chosen[-1] >= layers:
                raise ValueError("a source layer is out of range")
        if (self.perceptron is not None) != (self.family == "mlp"):
            raise ValueError("the mlp family, and no other, has a perceptron")
        if self.perceptron and self.support == "head-local" and self.perceptron.per != "head":
            raise ValueError("head-local support needs one network a head")
        if self.weights_dtype == "int8" and self.family not in ("ridge", NORMALISED):
            raise ValueError("int8 weights are for the ridge families")
        if self.normalised and not self.target.geometry.k_norm:
            raise ValueError(f"the target of a {NORMALISED} mapper has no k_norm")
        datetime.fromisoformat(self.created)  # ValueError: the 30th of February
        names = [entry.name.casefold() for entry in self.files]
        if len(set(names)) != len(names):
            raise ValueError("a file is listed twice")
        return self

    @property
    def normalised(self) -> bool:
        """Whether mapped keys go through the target's k_norm."""
        return self.family == NORMALISED

    def to_bytes(self) -> bytes:
        """The bytes of `manifest.json`; the digest is taken over exactly these."""
        value = self.model_dump(mode="json")
        for name in ("selection", "recipe", "perceptron", "training"):
            if value[name] is None:
                del value[name]
        for point in value.get("selection", {}).get("curve", ()):
            if point["recipe"] is None:
                del point["recipe"]
        return canonical_json(value) + b"\n"

    @property
    def digest(self) -> str:
        """sha256 of `to_bytes()`, hex: the mapper's identity."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all listed files."""
        return sum(entry.size for entry in self.files)
