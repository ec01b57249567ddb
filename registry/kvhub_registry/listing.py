"""What `kvhub list` shows, read from SQLite with the standard library alone.

SQLModel takes longer to import than this takes for ten thousand mappers. It only reads, and only a database
of the version that it knows; for all else it says None, and `Registry.list` answers or says what is wrong.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from kvhub_registry.names import answers_to, slug
from kvhub_registry.version import HEAD, VERSION_TABLE

STATES = ("draft", "ready", "retired")
"""Of `records.State`, which takes pydantic."""


class Listed(NamedTuple):
    """One line of the list. Scores are those of the mapped arm on all text; None where not measured."""

    digest: str
    source: str
    target: str
    family: str
    support: str
    k: int
    regularization: float
    convention: str
    dataset: str
    tokens: int
    state: str
    size: int
    path: str
    cosine: float | None
    gap: float | None
    r2_key: float | None
    """On the evaluation's text; before an evaluation, the fit's own."""
    r2_value: float | None


_SCORES = (
    ("attention_cosine", "all"),
    ("gap_recovered", "all"),
    ("r2_key", "all"),
    ("r2_value", "all"),
    ("r2_key", "fit"),
    ("r2_value", "fit"),
)
_SCORE = (
    "(SELECT value FROM kvhub_score WHERE mapper_digest = m.digest AND metric = '{}' AND arm = 'mapped'"
    " AND domain = '{}')"
)
_COLUMNS = ", ".join(
    (
        *("m.digest", "m.source_name", "m.target_name", "m.family", "m.support", "m.k", "m.regularization"),
        *("m.regularization_convention", "c.dataset", "c.tokens", "a.state", "a.size", "a.path"),
        *(_SCORE.format(metric, domain) for metric, domain in _SCORES),
    )
)
_QUERY = (
    f"SELECT {_COLUMNS} FROM kvhub_mapper m JOIN kvhub_artifact a ON a.mapper_digest = m.digest"
    " JOIN kvhub_calibration c ON c.digest = m.calibration_digest"
)
_ORDER = " ORDER BY m.target_slug, m.source_slug, m.created DESC"


def quick_list(
    database: Path,
    *,
    source: str | None = None,
    target: str | None = None,
    family: str | None = None,
    state: str | None = None,
) -> list[Listed] | None:
    """The mappers that pass every filter, in the order of `Registry.list`; None where it must be asked."""
    wanted = {
        "m.source_slug": slug(source) if source is not None else None,
        "m.target_slug": slug(target) if target is not None else None,
        "m.family": family,
        "a.state": state,
    }
    given = {column: value for column, value in wanted.items() if value is not None}
    where = " WHERE " + " AND ".join(f"{column} = ?" for column in given) if given else ""
    try:
        address = f"file:{quote(database.as_posix())}?mode=ro"
        with closing(sqlite3.connect(address, uri=True, timeout=5.0)) as connection:
            version = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()
            if version is None or version[0] != HEAD:
                return None
            rows = connection.execute(_QUERY + where + _ORDER, [*given.values()]).fetchall()
    except sqlite3.Error:
        return None
    found = []
    for row in rows:
        named = (source is None or answers_to(row[1], source)) and (
            target is None or answers_to(row[2], target)
        )
        if named:
            key, value, fit_key, fit_value = row[15:]
            r2 = (fit_key if key is None else key, fit_value if value is None else value)
            found.append(Listed._make((*row[:15], *r2)))
    return found
