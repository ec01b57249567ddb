"""Two mappers side by side: what was chosen otherwise, and what that did to the scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvhub.artifact.manifest import Manifest
from kvhub_registry import MapperRow, ScoreRecord

Better = Literal["A", "B", "same", "unclear"]

_LOWER = {"nll", "ppl_ratio", "excess_nll", "kl"}
"""Metrics of which less is better."""


@dataclass(frozen=True)
class Setting:
    """One thing that a fit may choose, as both mappers have it."""

    name: str
    a: str
    b: str

    @property
    def same(self) -> bool:
        """Whether it is no difference."""
        return self.a == self.b


@dataclass(frozen=True)
class LayerChoice:
    """Source layers of one target layer."""

    target_layer: int
    a: list[int]
    b: list[int]

    @property
    def same(self) -> bool:
        """Whether it is no difference."""
        return self.a == self.b


@dataclass(frozen=True)
class ScorePair:
    """One score of both; `better` is decided only where the 95 % intervals do not touch."""

    domain: str
    metric: str
    a: ScoreRecord | None
    b: ScoreRecord | None

    @property
    def better(self) -> Better:
        """Which one is; `unclear` where intervals overlap or a score is missing."""
        if self.a is None or self.b is None:
            return "unclear"
        if self.a.value == self.b.value:
            return "same"
        if self.a.low <= self.b.high and self.b.low <= self.a.high:
            return "unclear"
        return "A" if (self.a.value < self.b.value) == (self.metric in _LOWER) else "B"


@dataclass(frozen=True)
class Difference:
    """What `kvhub diff` shows."""

    settings: list[Setting]
    layers: list[LayerChoice]
    scores: list[ScorePair]


def compare(a: tuple[MapperRow, Manifest], b: tuple[MapperRow, Manifest]) -> Difference:
    """The differences of two registered mappers, of the same pair or not."""
    (row_a, one), (row_b, two) = a, b
    settings = [Setting(name, x, y) for (name, x), (_, y) in zip(_settings(one), _settings(two), strict=True)]
    layers = [
        LayerChoice(t, one.source_layers[t], two.source_layers[t])
        for t in range(min(len(one.source_layers), len(two.source_layers)))
    ]
    found_a, found_b = _mapped(row_a), _mapped(row_b)
    keys = sorted(found_a.keys() | found_b.keys(), key=lambda key: (key[0] != "all", key))
    scores = [ScorePair(*key, found_a.get(key), found_b.get(key)) for key in keys]
    return Difference(settings, layers, scores)


def _settings(manifest: Manifest) -> list[tuple[str, str]]:
    relative = manifest.regularization_convention == "relative-mean-diagonal"
    given = manifest.calibration
    return [
        ("source", f"{manifest.source.name} {manifest.source.revision}"),
        ("target", f"{manifest.target.name} {manifest.target.revision}"),
        ("family", manifest.family),
        ("support", manifest.support),
        ("k", str(manifest.k)),
        ("lambda", f"{manifest.regularization:g} ({'of the mean diagonal' if relative else 'absolute'})"),
        ("objective", manifest.objective),
        ("exact prefix", str(manifest.exact_prefix)),
        ("weights", manifest.weights_dtype),
        ("calibration", f"{given.dataset}, {given.rows} rows, {given.digest[:12]}"),
        ("size", str(manifest.size)),
        ("created", manifest.created),
    ]


def _mapped(row: MapperRow) -> dict[tuple[str, str], ScoreRecord]:
    return {(score.domain, score.metric): score for score in row.scores if score.arm == "mapped"}
