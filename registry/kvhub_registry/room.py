"""How much disk a transaction needs before it is committed: for what makes its own room."""

from __future__ import annotations

from sqlmodel import Session

_FRAME = 24
"""Bytes before each page in SQLite's log; those of a rollback journal are fewer."""
_MORE = 3
"""Pages besides: the first one, which each commit changes, the log's head, and the directory's."""


def image(session: Session) -> bytes | None:
    """The whole database as this transaction sees it; None where it is on a server.

    What the transaction changes stays in memory from now on until it is committed.
    """
    connection = session.connection()
    if connection.dialect.name != "sqlite":
        return None
    connection.exec_driver_sql("PRAGMA cache_spill=OFF")
    found = connection.connection.driver_connection
    return bytes(found.serialize()) if found is not None else None


def needed(session: Session, before: bytes) -> int:
    """Bytes of disk that the commit takes at most, `before` being the `image` at the beginning."""
    now = image(session) or b""
    size = int(session.connection().exec_driver_sql("PRAGMA page_size").scalar_one())
    if now == before:
        return 0
    starts = range(0, max(len(before), len(now)), size)
    changed = sum(before[at : at + size] != now[at : at + size] for at in starts)
    return (changed + _MORE) * (size + _FRAME) + max(0, len(now) - len(before))
