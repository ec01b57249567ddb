"""`Registry`: what a program asks of it. Plain records in, plain records out."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from sqlalchemy import Engine, delete
from sqlmodel import Session, col, select

from kvhub_registry import lifecycle, queries, room, schema
from kvhub_registry.connect import make_engine, parse, reading, writing
from kvhub_registry.errors import Ambiguous, NotRegistered
from kvhub_registry.lifecycle import SHORT
from kvhub_registry.names import is_digest_prefix, slug, split_pair
from kvhub_registry.records import (
    UNJUDGED,
    EventRecord,
    HubLocation,
    MapperRecord,
    MapperRow,
    ModelRecord,
    ScoreRecord,
    State,
)
from kvhub_registry.tables import (
    ArtifactTable,
    CalibrationTable,
    LocationTable,
    MapperTable,
    ModelTable,
    ScoreTable,
)

LONGEST = 200
"""Letters of a reference that a message repeats: `org/name->org/name` fits."""


class Registry:
    """The registry at one database. Safe between processes; every method is one transaction.

    Threads may share it. A process that forks opens its own.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def open(cls, url: str | Path, *, read_only: bool = False) -> Self:
        """Open the registry at `url` (a `Path`: a SQLite file); tables that are behind are made or upgraded.

        read_only: never writes (a serving process); a missing or older database
        is `NotRegistered`. Errors: `BadAddress`, `Denied`, `Damaged`, `TooNew`,
        `Unavailable`.
        """
        engine = make_engine(parse(url), read_only=read_only)
        try:
            schema.ensure(engine, read_only=read_only)
        except BaseException:
            engine.dispose()
            raise
        return cls(engine)

    def close(self) -> None:
        """Give connections back."""
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # reading

    def list(
        self,
        *,
        source: str | None = None,
        target: str | None = None,
        family: str | None = None,
        state: State | str | None = None,
    ) -> list[MapperRow]:
        """Mappers that pass every filter; a model is its full name or last component, any case."""
        wanted = State(state) if state is not None else None
        with reading(self._engine) as session:
            return queries.rows(session, source=source, target=target, family=family, state=wanted)

    def get(self, ref: str) -> MapperRow:
        """The one mapper that `ref` means: digest, its first six digits or more, alias, `source->target`.

        Raises `NotRegistered` or `Ambiguous` (whose hint lists the candidates).
        """
        with reading(self._engine) as session:
            found = queries.resolve(session, ref.strip())
        if len(found) == 1:
            return found[0]
        if not found:
            shape = is_digest_prefix(ref) or split_pair(ref)
            forms = (
                "" if shape else "; a mapper is a digest (six digits at least), an alias or 'source->target'"
            )
            raise NotRegistered(f"no mapper {_brief(ref)!r}{forms}", "kvhub list shows what is registered")
        shown = ", ".join(f"{row.digest[:SHORT]} ({row.state}, {row.created:%Y-%m-%d})" for row in found[:8])
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        raise Ambiguous(
            f"{_brief(ref)!r} fits {len(found)} mappers",
            f"give more of a digest: {shown}{more}",
            tuple(row.digest for row in found),
        )

    def at(self, repo_id: str, revision: str | None = None) -> MapperRow | None:
        """The mapper last pulled from or pushed to a repository, or to a revision or commit of it."""
        with reading(self._engine) as session:
            return queries.at(session, repo_id, revision)

    def health(self) -> str:
        """What is wrong with the database itself, "" where nothing is."""
        with reading(self._engine) as session:
            return queries.health(session)

    # writing

    def register(self, record: MapperRecord, scores: Iterable[ScoreRecord] = ()) -> MapperRow:
        """Write a mapper as a draft: models, calibration set, mapper, artifact and scores in one transaction.

        The same digest again moves its path and keeps its state and scores: the
        bytes are the same.
        """
        with writing(self._engine) as session:
            for model in (record.source, record.target):
                _add_model(session, model)
            given = record.calibration
            if session.get(CalibrationTable, given.digest) is None:
                session.add(CalibrationTable(**given.model_dump(exclude={"rows"})))
            session.flush()
            if session.get(MapperTable, record.digest) is None:
                session.add(_mapper(record))
                session.flush()
                session.add_all(_scores(record.digest, scores))
            artifact = session.get(ArtifactTable, record.digest)
            if artifact is None:
                artifact = ArtifactTable(
                    mapper_digest=record.digest,
                    path=record.path,
                    size=record.size,
                    state=State.DRAFT.value,
                    state_reason=UNJUDGED,
                    changed=datetime.now(UTC),
                )
                lifecycle.note(session, record.digest, State.DRAFT.value, "registered")
            artifact.path, artifact.size = record.path, record.size
            session.add(artifact)
            session.flush()
            return queries.rows(session, digests=[record.digest])[0]

    def set_state(self, digest: str, state: State | str, why: str, *, keep_retired: bool = False) -> State:
        """Change a mapper's state; `why` is shown beside it. Returns the state that now holds.

        keep_retired: a retired mapper stays so (only a person brings it back).
        Raises `NotRegistered`.
        """
        with writing(self._engine) as session:
            return lifecycle.change(session, digest, State(state), why, keep_retired=keep_retired)

    def add_scores(self, digest: str, scores: Iterable[ScoreRecord]) -> None:
        """Replace a mapper's scores by those of its newest evaluation. Raises `NotRegistered`."""
        with writing(self._engine) as session:
            lifecycle.replace_scores(session, digest, scores)

    def judge(self, digest: str, scores: Iterable[ScoreRecord], state: State | str, why: str) -> State:
        """Scores and the state that follows from them, in one transaction; a retired mapper stays retired.

        Returns the state that now holds. Raises `NotRegistered`.
        """
        with writing(self._engine) as session:
            lifecycle.replace_scores(session, digest, scores)
            return lifecycle.change(session, digest, State(state), why, keep_retired=True)

    def history(self, digest: str) -> builtins.list[EventRecord]:
        """What happened to a mapper, oldest first."""
        with reading(self._engine) as session:
            return lifecycle.events(session, digest)

    def add_location(self, digest: str, location: HubLocation) -> None:
        """Note where an artifact was pushed to or pulled from. Raises `NotRegistered`."""
        with writing(self._engine) as session:
            lifecycle.artifact_of(session, digest)
            row = LocationTable(mapper_digest=digest, **location.model_dump())
            same = (
                select(LocationTable.id)
                .where(col(LocationTable.mapper_digest) == digest)
                .where(col(LocationTable.repo_id) == row.repo_id)
                .where(col(LocationTable.commit) == row.commit)
                .where(col(LocationTable.pushed) == row.pushed)
            )
            if session.exec(same).first() is None:
                session.add(row)

    def set_alias(self, name: str, digest: str, why: str = "") -> str | None:
        """Point `name` at a mapper, moving it where it exists; returns the digest that it meant before.

        Raises `NotRegistered`, `BadAddress`.
        """
        with writing(self._engine) as session:
            return lifecycle.point(session, name, digest, why)

    def remove_alias(self, name: str, why: str = "") -> str:
        """Forget a name; returns the digest that it meant. Raises `NotRegistered`."""
        with writing(self._engine) as session:
            return lifecycle.unpoint(session, name, why)

    def remove(self, digest: str) -> MapperRow:
        """Forget a mapper with its scores, places and aliases; returns what was there.

        Models and calibration sets that nothing points at any more go too.
        Raises `NotRegistered`. Files are not touched.
        """
        return self.settle([digest], lambda _: True)[0]

    def settle(
        self,
        digests: Iterable[str],
        goes: Callable[[MapperRow], bool],
        last: Callable[[int], None] | None = None,
        *,
        measure: bool = False,
    ) -> builtins.list[MapperRow]:
        """As `remove` of several in one transaction, where `goes` says so of a row as it is now.

        last: called when all is written but the commit; with `measure` it is given the bytes of disk that
        the commit needs at most (0 where that is a server's affair). Returns the rows as they were.
        Nobody changes the registry while `goes` and `last` run; what they raise leaves everything as it was.
        """
        with writing(self._engine) as session:
            before = room.image(session) if measure else None
            rows = []
            for digest in digests:
                lifecycle.artifact_of(session, digest)
                rows += queries.rows(session, digests=[digest])
            going = [row.digest for row in rows if goes(row)]
            for digest in going:
                session.execute(delete(MapperTable).where(col(MapperTable.digest) == digest))
            session.flush()
            session.expire_all()
            for orphan in queries.unreferenced(session) if going else ():
                session.delete(orphan)
            session.flush()
            if last is not None:
                last(room.needed(session, before) if before is not None else 0)
            return rows


def _brief(ref: str) -> str:
    return ref if len(ref) <= LONGEST else f"{ref[:LONGEST]}..."


def _scores(digest: str, scores: Iterable[ScoreRecord]) -> list[ScoreTable]:
    return [ScoreTable(mapper_digest=digest, **score.model_dump()) for score in scores]


def _add_model(session: Session, model: ModelRecord) -> None:
    if session.get(ModelTable, model.digest) is None:
        session.add(ModelTable(**model.model_dump(exclude={"name"})))


def _mapper(record: MapperRecord) -> MapperTable:
    flat = record.model_dump(exclude={"source", "target", "calibration", "path", "size"})
    return MapperTable(
        source_digest=record.source.digest,
        source_name=record.source.name,
        source_slug=slug(record.source.name),
        target_digest=record.target.digest,
        target_name=record.target.name,
        target_slug=slug(record.target.name),
        calibration_digest=record.calibration.digest,
        calibration_rows=record.calibration.rows,
        **flat,
    )
