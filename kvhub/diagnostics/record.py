"""`assets/diagnostics.json`: what `kvhub diagnose` found, bound to a mapper's digest.

It stands among the assets, which an artifact may carry without listing them: an older kvhub reads on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from kvhub.artifact.beside import read_beside, write_beside
from kvhub.artifact.manifest import Manifest
from kvhub.evaluation.evidence import Score
from kvhub.model.identity import R2, Cosine, Count, Positive, Real, Record, Sha256, canonical_json

NAME = "assets/diagnostics.json"
LIMIT = 64 << 20


class LayerDiagnosis(Record):
    """One target layer over all windows; lists are by query head."""

    attention_cosine: list[Cosine]
    key_concentration: list[Real]
    value_concentration: list[Real]
    attention_kl: list[Real]
    output_error: list[Real]
    residual_error: Real
    key_error: Real
    value_error: Real


class PositionProfile(Record):
    """Mean over layers of the error at every prefix position, as a share of the layer's spread."""

    domain: str = Field(min_length=1, max_length=64)
    key: list[Real]
    value: list[Real]


class LayerMaps(Record):
    """R2 of one source layer for one target layer: `[target layers][source layers]`."""

    rows: Count
    raw_key: list[list[R2]]
    content_key: list[list[R2]]
    value: list[list[R2]]


class KPoint(Record):
    """Held-out R2 of ridges with the k best source layers, mean over target layers."""

    k: int = Field(ge=1, le=1024)
    r2_key: R2
    r2_value: R2


class Diagnostics(Record):
    """All that was found for one mapper on one text."""

    schema_version: Literal[1] = 1
    mapper: Sha256
    kvhub_version: str
    created: str
    text: Sha256
    """sha256 over the token ids of all windows, as in the evidence."""
    windows: Positive
    prefix: Positive
    tail: Positive
    exact_prefix: Count
    scores: list[Score]
    layers: list[LayerDiagnosis]
    positions: list[PositionProfile]
    maps: LayerMaps | None = None
    by_k: list[KPoint] = Field(default_factory=list)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        keys = [(score.metric, score.arm, score.domain) for score in self.scores]
        if len(set(keys)) != len(keys):
            raise ValueError("a score is given twice")
        if self.maps is not None:
            sides = (self.maps.raw_key, self.maps.content_key, self.maps.value)
            shapes = {(len(rows), *{len(row) for row in rows}) for rows in sides}
            if len(shapes) != 1 or len(shape := shapes.pop()) != 2 or 0 in shape:
                raise ValueError("the R2 maps are not of one shape")
        return self

    def to_bytes(self) -> bytes:
        """The bytes of `diagnostics.json`."""
        return canonical_json(self.model_dump(mode="json")) + b"\n"

    def score(self, metric: str, domain: str = "all") -> Score | None:
        """The score for one metric and domain, or None."""
        return next((s for s in self.scores if (s.metric, s.domain) == (metric, domain)), None)


def read_diagnostics(directory: Path, manifest: Manifest) -> Diagnostics | None:
    """The diagnostics beside `manifest`, or None where there are none. Errors: those of `read_beside`."""
    return read_beside(directory, NAME, manifest, Diagnostics, limit=LIMIT, what="the diagnostics were")


def write_diagnostics(directory: Path, diagnostics: Diagnostics) -> Path:
    """Put them into an artifact's assets; returns the path. Errors: those of `write_beside`."""
    return write_beside(directory, NAME, diagnostics.to_bytes())
