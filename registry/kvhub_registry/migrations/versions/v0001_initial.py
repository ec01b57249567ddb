"""Models, mappers, calibration sets, artifacts, scores, hub locations, aliases."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables of the first release."""
    op.create_table(
        "kvhub_model",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("revision", sa.String(), nullable=False),
        sa.Column("architecture", sa.String(), nullable=False),
        sa.Column("dtype", sa.String(), nullable=False),
        sa.Column("num_layers", sa.Integer(), nullable=False),
        sa.Column("num_kv_heads", sa.Integer(), nullable=False),
        sa.Column("head_dim", sa.Integer(), nullable=False),
    )
    op.create_table(
        "kvhub_calibration",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("dataset", sa.String(), nullable=False),
        sa.Column("revision", sa.String(), nullable=True),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "kvhub_mapper",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("family", sa.String(), nullable=False, index=True),
        sa.Column("support", sa.String(), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("regularization", sa.Float(), nullable=False),
        sa.Column("regularization_convention", sa.String(), nullable=False),
        sa.Column("exact_prefix", sa.Integer(), nullable=False),
        sa.Column(
            "source_digest", sa.String(), sa.ForeignKey("kvhub_model.digest"), nullable=False, index=True
        ),
        sa.Column("source_name", sa.String(), nullable=False),
        sa.Column("source_slug", sa.String(), nullable=False, index=True),
        sa.Column(
            "target_digest", sa.String(), sa.ForeignKey("kvhub_model.digest"), nullable=False, index=True
        ),
        sa.Column("target_name", sa.String(), nullable=False),
        sa.Column("target_slug", sa.String(), nullable=False, index=True),
        sa.Column(
            "calibration_digest",
            sa.String(),
            sa.ForeignKey("kvhub_calibration.digest"),
            nullable=False,
            index=True,
        ),
        sa.Column("calibration_rows", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "kvhub_artifact",
        _mapper(primary_key=True),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), nullable=False, index=True),
        sa.Column("state_reason", sa.String(), nullable=False),
        sa.Column("changed", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("state IN ('draft', 'ready', 'retired')", name="kvhub_artifact_state"),
    )
    op.create_table(
        "kvhub_score",
        _mapper(primary_key=True),
        sa.Column("metric", sa.String(), primary_key=True),
        sa.Column("arm", sa.String(), primary_key=True),
        sa.Column("domain", sa.String(), primary_key=True),
        sa.Column("value", sa.Float(), nullable=False),
        sa.Column("low", sa.Float(), nullable=False),
        sa.Column("high", sa.Float(), nullable=False),
        sa.Column("n", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "kvhub_location",
        sa.Column("id", sa.Integer(), primary_key=True),
        _mapper(index=True),
        sa.Column("repo_id", sa.String(), nullable=False),
        sa.Column("commit", sa.String(), nullable=False),
        sa.Column("pushed", sa.Boolean(), nullable=False),
        sa.UniqueConstraint("mapper_digest", "repo_id", "commit", "pushed", name="kvhub_location_once"),
    )
    op.create_table(
        "kvhub_alias",
        sa.Column("name", sa.String(), primary_key=True),
        _mapper(index=True),
    )


def _mapper(*, primary_key: bool = False, index: bool = False) -> sa.Column[str]:
    """Every row that belongs to a mapper goes with it."""
    return sa.Column(
        "mapper_digest",
        sa.String(),
        sa.ForeignKey("kvhub_mapper.digest", ondelete="CASCADE"),
        primary_key=primary_key,
        nullable=False,
        index=index,
    )
