"""One mapper and its history, read from SQLite with the standard library alone.

As `listing` does for many: SQLModel takes longer to import than all of `kvhub info`. What is not exactly one
mapper of the version that this knows is None, and `Registry` answers or says what is wrong.
"""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvhub_registry.listing import snapshot
from kvhub_registry.names import answers_to, is_digest_prefix, slug, split_pair
from kvhub_registry.records import (
    CalibrationRecord,
    EventRecord,
    HubLocation,
    MapperRow,
    ModelRecord,
    ScoreRecord,
    State,
)

_MODEL = ("digest", "revision", "architecture", "dtype", "num_layers", "num_kv_heads", "head_dim")
_MAPPER = ("digest", "family", "support", "k", "regularization", "regularization_convention", "exact_prefix")
_SAME = "a.mapper_digest = m.digest"
_SCORE = ("metric", "arm", "domain", "value", "low", "high", "n")


def quick_get(database: Path, ref: str) -> tuple[MapperRow, list[EventRecord]] | None:
    """What `Registry.get` and `Registry.history` say of the one mapper that `ref` means; None: ask them."""
    try:
        with snapshot(database) as connection:
            found = [] if connection is None else _resolve(connection, ref.strip())
            return _read(connection, found[0]) if connection is not None and len(found) == 1 else None
    except (sqlite3.Error, ValueError, TypeError):  # also a row that is no record
        return None


def _resolve(connection: sqlite3.Connection, ref: str) -> list[str]:
    """Digests, as `queries.resolve` looks for them."""

    def digests(where: str, *given: str) -> list[str]:
        query = (
            f"SELECT m.digest FROM kvhub_mapper m JOIN kvhub_artifact a ON a.mapper_digest = m.digest {where}"
        )
        return [row[0] for row in connection.execute(query, given)]

    if exact := digests("WHERE m.digest = ?", ref):
        return exact
    name = ref.removeprefix("@")
    if alias := digests("JOIN kvhub_alias n ON n.mapper_digest = m.digest WHERE n.name = ?", name):
        return alias
    if ref.startswith("@"):
        return []
    if is_digest_prefix(ref):
        return digests("WHERE m.digest >= ? AND m.digest < ?", ref, ref + "g")
    pair = split_pair(ref)
    if pair is None:
        return []
    query = (
        "SELECT digest, source_name, target_name FROM kvhub_mapper WHERE source_slug = ? AND target_slug = ?"
    )
    return [
        digest
        for digest, source, target in connection.execute(query, (slug(pair[0]), slug(pair[1])))
        if answers_to(source, pair[0]) and answers_to(target, pair[1])
    ]


def _read(connection: sqlite3.Connection, digest: str) -> tuple[MapperRow, list[EventRecord]]:
    def all_of(query: str) -> list[Any]:
        return connection.execute(query, (digest,)).fetchall()

    names = [f"m.{name}" for name in _MAPPER]
    names += ["m.source_name", "m.target_name", "m.calibration_rows", "m.created"]
    names += ["a.path", "a.size", "a.state", "a.state_reason", "a.changed"]
    names += ["c.digest", "c.dataset", "c.revision", "c.tokens"]
    names += [f"{side}.{name}" for side in "st" for name in _MODEL]
    (row,) = all_of(
        f"SELECT {', '.join(names)} FROM kvhub_mapper m JOIN kvhub_artifact a ON {_SAME}"
        " JOIN kvhub_calibration c ON c.digest = m.calibration_digest"
        " JOIN kvhub_model s ON s.digest = m.source_digest JOIN kvhub_model t ON t.digest = m.target_digest"
        " WHERE m.digest = ?"
    )
    found = dict(zip(names, row, strict=True))

    def model(side: str, name: str) -> ModelRecord:
        return ModelRecord(name=found[name], **{column: found[f"{side}.{column}"] for column in _MODEL})

    of_it = "WHERE mapper_digest = ? ORDER BY"
    scores = all_of(f"SELECT {', '.join(_SCORE)} FROM kvhub_score {of_it} domain, metric, arm")
    aliases = all_of(f"SELECT name FROM kvhub_alias {of_it} name")
    places = all_of(f'SELECT repo_id, "commit", pushed FROM kvhub_location {of_it} id')
    events = all_of(f"SELECT at, what, why FROM kvhub_event {of_it} id")
    whole = MapperRow(
        **{column: found[f"m.{column}"] for column in _MAPPER},
        source=model("s", "m.source_name"),
        target=model("t", "m.target_name"),
        calibration=CalibrationRecord(
            rows=found["m.calibration_rows"],
            **{column: found[f"c.{column}"] for column in ("digest", "dataset", "revision", "tokens")},
        ),
        created=_instant(found["m.created"]),
        path=found["a.path"],
        size=found["a.size"],
        state=State(found["a.state"]),
        state_reason=found["a.state_reason"],
        changed=_instant(found["a.changed"]),
        scores=tuple(ScoreRecord(**dict(zip(_SCORE, score, strict=True))) for score in scores),
        aliases=tuple(name for (name,) in aliases),
        locations=tuple(
            HubLocation(repo_id=repo, commit=commit, pushed=bool(pushed)) for repo, commit, pushed in places
        ),
    )
    return whole, [EventRecord(at=_instant(at), what=what, why=why) for at, what, why in events]


def _instant(text: str) -> datetime:
    """SQLAlchemy's text of a moment, which is in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)
