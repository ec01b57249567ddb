"""States and aliases, each change with its event; within a transaction that the caller holds."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from sqlmodel import Session, col, delete, select

from kvhub_registry.errors import BadAddress, NotRegistered
from kvhub_registry.names import is_digest_prefix, split_pair
from kvhub_registry.records import EventRecord, ScoreRecord, State
from kvhub_registry.tables import AliasTable, ArtifactTable, EventTable, ScoreTable

SHORT = 12
"""Digits of a digest shown to people."""


def artifact_of(session: Session, digest: str) -> ArtifactTable:
    """The artifact of a registered mapper. Raises `NotRegistered`."""
    artifact = session.get(ArtifactTable, digest)
    if artifact is None:
        raise NotRegistered(f"no mapper {digest[:SHORT]!r}", "kvhub list shows what is registered")
    return artifact


def change(session: Session, digest: str, state: State, why: str, *, keep_retired: bool) -> State:
    """Write a state, with an event where it differs from what was; returns the state that now holds."""
    artifact = artifact_of(session, digest)
    if keep_retired and artifact.state == State.RETIRED.value:
        return State.RETIRED
    if (artifact.state, artifact.state_reason) != (state.value, why):
        artifact.state, artifact.state_reason = state.value, why
        artifact.changed = datetime.now(UTC)
        session.add(artifact)
        note(session, digest, state.value, why)
    return state


def replace_scores(session: Session, digest: str, scores: Iterable[ScoreRecord]) -> None:
    """A mapper's scores are those of its newest evaluation."""
    artifact_of(session, digest)
    session.execute(delete(ScoreTable).where(col(ScoreTable.mapper_digest) == digest))
    session.add_all([ScoreTable(mapper_digest=digest, **score.model_dump()) for score in scores])


def point(session: Session, name: str, digest: str, why: str) -> str | None:
    """Let `name` mean a mapper; returns what it meant before. Raises `NotRegistered`, `BadAddress`."""
    if not name or name.startswith("@") or is_digest_prefix(name) or split_pair(name) or name != name.strip():
        raise BadAddress(f"{name!r} cannot be an alias", "it reads as a digest or as a pair")
    artifact_of(session, digest)
    alias = session.get(AliasTable, name)
    before = None if alias is None else alias.mapper_digest
    if before == digest:
        return before
    if before is not None:
        note(session, before, f"alias {name} moved away", why)
    session.merge(AliasTable(name=name, mapper_digest=digest))
    note(session, digest, f"alias {name}", why)
    return before


def unpoint(session: Session, name: str, why: str) -> str:
    """Forget an alias; returns the digest that it meant. Raises `NotRegistered`."""
    alias = session.get(AliasTable, name)
    if alias is None:
        raise NotRegistered(f"no alias {name[:200]!r}", "kvhub alias lists them")
    note(session, alias.mapper_digest, f"alias {name} removed", why)
    digest = alias.mapper_digest
    session.delete(alias)
    return digest


def note(session: Session, digest: str, what: str, why: str) -> None:
    """Add an event."""
    session.add(EventTable(mapper_digest=digest, at=datetime.now(UTC), what=what, why=why))


def events(session: Session, digest: str) -> list[EventRecord]:
    """A mapper's life, oldest first."""
    query = select(EventTable).where(col(EventTable.mapper_digest) == digest).order_by(col(EventTable.id))
    return [EventRecord(at=event.at, what=event.what, why=event.why) for event in session.exec(query).all()]
