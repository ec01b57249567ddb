"""The version of a database: checked with one SELECT, upgraded only when it differs.

Alembic is imported for an upgrade alone; opening an up-to-date registry costs
one query. Versions are ordinals ("0001", "0002", ...), so a newer one is seen.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from kvhub_registry.connect import reading, where, writing
from kvhub_registry.errors import Behind, Damaged, NotRegistered, TooNew
from kvhub_registry.version import HEAD, VERSION_TABLE

__all__ = ["HEAD", "VERSION_TABLE", "current", "ensure"]

MIGRATIONS = Path(__file__).parent / "migrations"


def ensure(engine: Engine, *, read_only: bool = False) -> None:
    """Bring the database to `HEAD`. Raises `TooNew`, `Damaged`, `Denied`, `Unavailable`."""
    place = where(engine.url)
    with reading(engine) as session:
        found = current(session.connection())
    _check(found, place)
    if found == HEAD:
        return
    if read_only:
        if found is None:
            raise NotRegistered(f"the registry at {place} is empty", "kvhub fit or kvhub pull makes one")
        raise Behind(f"the registry at {place} is not up to date", "run kvhub list once to upgrade it")
    with writing(engine) as session:
        connection = session.connection()
        found = current(connection)  # again, under the lock: another process may have been first
        _check(found, place)
        if found is None and engine.dialect.name == "sqlite" and inspect(connection).get_table_names():
            raise Damaged(f"{place} is a database of something else", "set KVHUB_HOME or KVHUB_DATABASE_URL")
        if found != HEAD:
            _upgrade(connection)


def current(connection: Connection) -> str | None:
    """The version of this database, None where it has no kvhub tables."""
    if connection.dialect.name == "sqlite":
        known = text("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = :name")
        if connection.execute(known, {"name": VERSION_TABLE}).first() is None:
            return None
    elif connection.execute(text("SELECT to_regclass(:name)"), {"name": VERSION_TABLE}).scalar() is None:
        return None
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    return None if found is None else str(found)


def _check(found: str | None, place: str) -> None:
    if found is not None and found > HEAD:
        raise TooNew(
            f"the registry at {place} was written by a newer kvhub (schema {found}, this one knows {HEAD})",
            "upgrade kvhub: pip install -U kvhub",
        )


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
