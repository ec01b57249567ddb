"""What happened to each mapper, when and why."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Add the events; a mapper registered before begins with the state it has."""
    op.create_table(
        "kvhub_event",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column(
            "mapper_digest",
            sa.String(),
            sa.ForeignKey("kvhub_mapper.digest", ondelete="CASCADE"),
            nullable=False,
            index=True,
        ),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("what", sa.String(), nullable=False),
        sa.Column("why", sa.String(), nullable=False),
    )
    op.execute(
        "INSERT INTO kvhub_event (mapper_digest, at, what, why) "
        "SELECT mapper_digest, changed, state, state_reason FROM kvhub_artifact"
    )
