"""What `kvhub list` and a local search show, read from SQLite with the standard library alone.

SQLModel takes longer to import than this takes for ten thousand mappers. It only reads, and only a database
of the version that it knows; for all else it says None, and `Registry.list` answers or says what is wrong.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvhub_registry.files import read_only_address
from kvhub_registry.names import answers_to, slug
from kvhub_registry.version import HEAD, VERSION_TABLE

STATES = ("draft", "ready", "retired")
"""Of `records.State`, which takes pydantic."""
FIT_DOMAIN = "fit"
"""Domain of the R2 that the fit itself measured, on held-out calibration windows."""


class Place(NamedTuple):
    """Where on the Hub a mapper is."""

    repo_id: str
    commit: str
    pushed: bool


class Listed(NamedTuple):
    """One mapper. Scores are those of the mapped arm on all text; None where not measured."""

    digest: str
    source: str
    target: str
    family: str
    support: str
    k: int
    regularization: float
    convention: str
    exact_prefix: int
    dataset: str
    tokens: int
    state: str
    state_reason: str
    changed: str
    """As ISO 8601 in UTC, and so is `created`."""
    size: int
    path: str
    created: str
    source_revision: str
    target_revision: str
    cosine: float | None = None
    gap: float | None = None
    top1: float | None = None
    r2_key: float | None = None
    """On the evaluation's text; before an evaluation, the fit's own."""
    r2_value: float | None = None
    aliases: tuple[str, ...] = ()
    locations: tuple[Place, ...] = ()


_INSTANT = "replace(replace({}, ' ', 'T'), '.000000', '') || 'Z'"
"""SQLAlchemy's text of a moment (in UTC) as ISO 8601."""
_QUERY = (  # the columns in the order of `Listed`
    "SELECT m.digest, m.source_name, m.target_name, m.family, m.support, m.k, m.regularization,"
    " m.regularization_convention, m.exact_prefix, c.dataset, c.tokens, a.state, a.state_reason,"
    f" {_INSTANT.format('a.changed')}, a.size, a.path, {_INSTANT.format('m.created')}, s.revision, t.revision"
    " FROM kvhub_mapper m JOIN kvhub_artifact a ON a.mapper_digest = m.digest"
    " JOIN kvhub_calibration c ON c.digest = m.calibration_digest"
    " JOIN kvhub_model s ON s.digest = m.source_digest JOIN kvhub_model t ON t.digest = m.target_digest"
)
_ORDER = " ORDER BY m.target_slug, m.source_slug, m.created DESC"
_METRICS = ("attention_cosine", "gap_recovered", "top1", "r2_key", "r2_value")
"""In the order of `Listed`."""
_SCORES = (
    "SELECT mapper_digest, metric, value FROM kvhub_score WHERE arm = 'mapped'"
    f" AND domain IN ('all', '{FIT_DOMAIN}') AND metric IN {_METRICS}{{}}"
    " ORDER BY domain DESC"  # the fit's own first, so that a measured one replaces it
)
_ALIASES = "SELECT mapper_digest, name FROM kvhub_alias WHERE 1{} ORDER BY name"
_PLACES = 'SELECT mapper_digest, repo_id, "commit", pushed FROM kvhub_location WHERE 1{} ORDER BY id'
_FEW = 200
"""Mappers for which rows are looked up one by one; for more, whole tables are read."""


def quick_list(
    database: Path,
    *,
    source: str | None = None,
    target: str | None = None,
    family: str | None = None,
    state: str | None = None,
    text: str | None = None,
) -> list[Listed] | None:
    """The mappers that pass every filter, in the order of `Registry.list`; None where it must be asked.

    text: part of a model's name, the digest, an alias or a repository, in any case.
    """
    wanted = {
        "m.source_slug": slug(source) if source is not None else None,
        "m.target_slug": slug(target) if target is not None else None,
        "m.family": family,
        "a.state": state,
    }
    given = {column: value for column, value in wanted.items() if value is not None}
    where = " WHERE " + " AND ".join(f"{column} = ?" for column in given) if given else ""
    try:
        with snapshot(database) as connection:
            if connection is None:
                return None
            rows = [
                row
                for row in connection.execute(_QUERY + where + _ORDER, [*given.values()])
                if (source is None or answers_to(row[1], source))
                and (target is None or answers_to(row[2], target))
            ]
            return _complete(connection, rows, (text or "").casefold())
    except sqlite3.Error:
        return None


@contextmanager
def snapshot(database: Path) -> Iterator[sqlite3.Connection | None]:
    """A database of the version known here as it is now, for reading; None where it is of another one.

    Errors: `sqlite3.Error`.
    """
    with closing(sqlite3.connect(read_only_address(database), uri=True, timeout=5.0)) as connection:
        version = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchone()
        if version is None or version[0] != HEAD:
            yield None
            return
        connection.execute("BEGIN")  # one snapshot for all that follows
        yield connection


def _complete(connection: sqlite3.Connection, rows: Sequence[tuple[Any, ...]], text: str) -> list[Listed]:
    """Names first, because `text` may be in them; scores for what is left."""
    aliases: dict[str, list[str]] = defaultdict(list)
    for digest, name in _of(connection, _ALIASES, rows):
        aliases[digest].append(name)
    places: dict[str, list[Place]] = defaultdict(list)
    for digest, repo_id, commit, pushed in _of(connection, _PLACES, rows):
        places[digest].append(Place(repo_id, commit, bool(pushed)))
    if text:
        rows = [
            row
            for row in rows
            if any(text in str(name).casefold() for name in (*row[:3], *aliases.get(row[0], ())))
            or any(text in place.repo_id.casefold() for place in places.get(row[0], ()))
        ]
    scores: dict[str, dict[str, float]] = defaultdict(dict)
    for digest, metric, value in _of(connection, _SCORES, rows):
        scores[digest][metric] = value
    found = []
    for row in rows:
        measured = scores.get(row[0], {})
        values = (measured.get(metric) for metric in _METRICS)
        names = tuple(aliases.get(row[0], ()))
        found.append(Listed._make((*row, *values, names, tuple(places.get(row[0], ())))))
    return found


def _of(
    connection: sqlite3.Connection, query: str, rows: Sequence[tuple[Any, ...]]
) -> Iterable[tuple[Any, ...]]:
    if len(rows) > _FEW:
        return connection.execute(query.format(""))
    digests = [row[0] for row in rows]
    chosen = f" AND mapper_digest IN ({', '.join('?' * len(digests))})"
    return connection.execute(query.format(chosen), digests)
