"""`evidence.json`: held-out scores bound to a mapper's digest (law 4).

It stands beside the manifest, not in it: scores are measured after the digest
exists, and measuring again must not change the mapper's identity.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from kvhub.model.identity import (
    HIGHEST,
    R2,
    Cosine,
    Count,
    Positive,
    Real,
    Record,
    Sha256,
    Share,
    canonical_json,
)

Arm = Literal["native", "source", "mapped", "empty", "wrong-document"]

ALL = "all"
"""The domain name that stands for every window together."""

RESERVED = (ALL, "fit")
"""What no text may be called: the registry keeps the fit's own R2 under `fit`."""

ARMS: tuple[Arm, ...] = ("native", "source", "mapped", "empty", "wrong-document")


_CAN_BE: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(kind)
    for kind, names in (
        (R2, ("r2_key", "r2_value")),
        (Cosine, ("attention_cosine", "attention_cosine_worst")),
        (Share, ("top1",)),
    )
    for name in names
}
"""Metrics that cannot be any number."""


class Score(Record):
    """One measured number: `value` with its 95 % interval over `n` items."""

    metric: str = Field(pattern=r"^[a-z0-9_]{1,48}$")
    """nll, ppl_ratio, excess_nll, gap_recovered, kl, top1, attention_cosine,
    attention_cosine_worst, r2_key, r2_value"""
    arm: Arm
    domain: str = Field(min_length=1, max_length=64)
    """Name of the text, or `all`."""
    value: Real
    low: Real
    high: Real
    n: Count
    """Positions scored (tokens), or rows for R2 and cosine."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"the interval of {self.metric} is empty")
        known = _CAN_BE.get(self.metric)
        try:
            if known is not None:
                known.validate_python(self.value)
        except ValidationError:
            raise ValueError(f"{self.metric} cannot be {self.value:.6g}") from None
        return self


class LayerScores(Record):
    """One target layer over all windows: where a mapper is weak. No part of the gate."""

    attention_cosine: list[Cosine]
    """Per query head."""
    r2_key: R2
    r2_value: R2


class GateCheck(Record):
    """One condition of the gate and what was found."""

    name: str
    passed: bool
    found: Real
    limit: Real
    domain: str


class Verdict(Record):
    """The gate's answer; `passed` turns a draft into ready."""

    passed: bool
    checks: list[GateCheck]


class Evidence(Record):
    """All scores of one evaluation of one mapper."""

    schema_version: Literal[1] = 1
    mapper: Sha256
    """Digest of the mapper these scores belong to."""
    kvhub_version: str
    created: str
    protocol: str
    """Prefix and tail lengths, dtype, seed: enough to run it again."""
    text: Sha256
    """sha256 over the exact token ids of all items."""
    windows: Positive
    exact_prefix: Count
    injection_max_logit_error: float = Field(ge=0, le=HIGHEST)
    """Largest logit difference when the target's own cache is re-injected."""
    scores: list[Score]
    layers: list[LayerScores] = Field(default_factory=list)
    """Per target layer; empty when not measured."""
    verdict: Verdict

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        keys = [(score.metric, score.arm, score.domain) for score in self.scores]
        if len(set(keys)) != len(keys):
            raise ValueError("a score is given twice")
        return self

    def to_bytes(self) -> bytes:
        """The bytes of `evidence.json`."""
        return canonical_json(self.model_dump(mode="json")) + b"\n"

    def score(self, metric: str, arm: Arm = "mapped", domain: str = "all") -> Score | None:
        """The score for one metric, arm and domain, or None."""
        for score in self.scores:
            if (score.metric, score.arm, score.domain) == (metric, arm, domain):
                return score
        return None
