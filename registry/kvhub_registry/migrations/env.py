"""Alembic's environment: always the connection, and the transaction, that `schema.ensure` holds."""

from __future__ import annotations

from alembic import context
from sqlmodel import SQLModel

from kvhub_registry import tables
from kvhub_registry.schema import VERSION_TABLE

assert tables  # imported for its tables' metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=SQLModel.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,
)
context.run_migrations()
