"""The tables. Rows never leave this package: `queries` turns them into records.

Table models are not validated by SQLModel; `records` are, and every row is
built from one. Names carry a prefix because a PostgreSQL database may be shared.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, UniqueConstraint
from sqlmodel import Field, SQLModel


class ModelTable(SQLModel, table=True):
    """A model by identity: what a pair's two sides point to."""

    __tablename__ = "kvhub_model"

    digest: str = Field(primary_key=True, max_length=64)
    revision: str
    architecture: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int


class CalibrationTable(SQLModel, table=True):
    """A calibration set: exact token ids, by digest."""

    __tablename__ = "kvhub_calibration"

    digest: str = Field(primary_key=True, max_length=64)
    dataset: str
    revision: str | None
    tokens: int = Field(sa_type=BigInteger)


class MapperTable(SQLModel, table=True):
    """A mapper. Names of its two models are its own: another mapper may call the same bytes otherwise."""

    __tablename__ = "kvhub_mapper"

    digest: str = Field(primary_key=True, max_length=64)
    family: str = Field(index=True)
    support: str
    k: int
    regularization: float
    regularization_convention: str
    exact_prefix: int
    source_digest: str = Field(foreign_key="kvhub_model.digest", index=True)
    source_name: str
    source_slug: str = Field(index=True)
    target_digest: str = Field(foreign_key="kvhub_model.digest", index=True)
    target_name: str
    target_slug: str = Field(index=True)
    calibration_digest: str = Field(foreign_key="kvhub_calibration.digest", index=True)
    calibration_rows: int = Field(sa_type=BigInteger)
    created: datetime


class ArtifactTable(SQLModel, table=True):
    """The files of a mapper on this machine, and whether they may serve."""

    __tablename__ = "kvhub_artifact"
    __table_args__ = (CheckConstraint("state IN ('draft', 'ready', 'retired')", name="kvhub_artifact_state"),)

    mapper_digest: str = Field(primary_key=True, foreign_key="kvhub_mapper.digest", ondelete="CASCADE")
    path: str
    size: int = Field(sa_type=BigInteger)
    state: str = Field(index=True)
    state_reason: str
    changed: datetime


class ScoreTable(SQLModel, table=True):
    """One held-out number with its interval."""

    __tablename__ = "kvhub_score"

    mapper_digest: str = Field(primary_key=True, foreign_key="kvhub_mapper.digest", ondelete="CASCADE")
    metric: str = Field(primary_key=True)
    arm: str = Field(primary_key=True)
    domain: str = Field(primary_key=True)
    value: float
    low: float
    high: float
    n: int = Field(sa_type=BigInteger)


class LocationTable(SQLModel, table=True):
    """Where on the Hub an artifact was pushed to or pulled from."""

    __tablename__ = "kvhub_location"
    __table_args__ = (
        UniqueConstraint("mapper_digest", "repo_id", "commit", "pushed", name="kvhub_location_once"),
    )

    id: int | None = Field(default=None, primary_key=True)
    mapper_digest: str = Field(foreign_key="kvhub_mapper.digest", ondelete="CASCADE", index=True)
    repo_id: str
    commit: str
    pushed: bool


class AliasTable(SQLModel, table=True):
    """A name for people, pointing at one mapper."""

    __tablename__ = "kvhub_alias"

    name: str = Field(primary_key=True)
    mapper_digest: str = Field(foreign_key="kvhub_mapper.digest", ondelete="CASCADE", index=True)


class EventTable(SQLModel, table=True):
    """What happened to a mapper: a state, or an alias that came or went, when and why."""

    __tablename__ = "kvhub_event"

    id: int | None = Field(default=None, primary_key=True)
    mapper_digest: str = Field(foreign_key="kvhub_mapper.digest", ondelete="CASCADE", index=True)
    at: datetime
    what: str
    why: str
