"""What goes into the registry and what comes out: plain records, no ORM objects."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class State(StrEnum):
    """`draft` until the gate has passed, `ready` to serve, `retired` by hand."""

    DRAFT = "draft"
    READY = "ready"
    RETIRED = "retired"


UNJUDGED = "not evaluated"
"""The reason that a mapper's state has when its row is made."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelRecord(_Record):
    """A model as the registry knows it; `digest` is `ModelIdentity.digest`."""

    digest: str
    name: str
    revision: str
    architecture: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int


class CalibrationRecord(_Record):
    digest: str
    dataset: str
    revision: str | None
    tokens: int
    rows: int


class ScoreRecord(_Record):
    """One number with its 95 % interval; mirrors `evidence.json`."""

    metric: str
    arm: str
    domain: str
    value: float
    low: float
    high: float
    n: int


class MapperRecord(_Record):
    """Everything that registering a mapper writes, in one transaction."""

    digest: str
    family: str
    support: str
    k: int
    regularization: float
    regularization_convention: str
    exact_prefix: int
    source: ModelRecord
    target: ModelRecord
    calibration: CalibrationRecord
    created: datetime
    path: str
    """Absolute path of the artifact directory."""
    size: int
    """Bytes of the artifact."""


class HubLocation(_Record):
    """Where on the Hub an artifact is: repository and exact commit."""

    repo_id: str
    commit: str
    pushed: bool
    """True: pushed from here; False: pulled."""


class EventRecord(_Record):
    """One step of a mapper's life."""

    at: datetime
    what: str
    """A state, `alias NAME` or `alias NAME moved away`."""
    why: str


class MapperRow(MapperRecord):
    """A mapper as read back, with state, scores and places."""

    state: State
    state_reason: str
    changed: datetime
    """When the state was last written."""
    scores: tuple[ScoreRecord, ...] = ()
    aliases: tuple[str, ...] = ()
    locations: tuple[HubLocation, ...] = ()

    def score(self, metric: str, arm: str = "mapped", domain: str = "all") -> float | None:
        """The value of one score, or None."""
        for score in self.scores:
            if (score.metric, score.arm, score.domain) == (metric, arm, domain):
                return score.value
        return None
