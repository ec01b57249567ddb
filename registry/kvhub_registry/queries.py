"""Reading: joined rows become records, in a fixed number of statements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlmodel import Session, col, or_, select

from kvhub_registry.names import answers_to, is_digest_prefix, slug, split_pair
from kvhub_registry.records import CalibrationRecord, HubLocation, MapperRow, ModelRecord, ScoreRecord, State
from kvhub_registry.tables import (
    AliasTable,
    ArtifactTable,
    CalibrationTable,
    LocationTable,
    MapperTable,
    ModelTable,
    ScoreTable,
)


def rows(
    session: Session,
    *,
    digests: Sequence[str] | None = None,
    prefix: str | None = None,
    source: str | None = None,
    target: str | None = None,
    family: str | None = None,
    state: State | None = None,
) -> list[MapperRow]:
    """All mappers that pass every given filter, ordered by target, source and date (newest first)."""
    query = (
        select(MapperTable, ArtifactTable)
        .join(ArtifactTable, col(ArtifactTable.mapper_digest) == col(MapperTable.digest))
        .order_by(col(MapperTable.target_slug), col(MapperTable.source_slug), col(MapperTable.created).desc())
    )
    if digests is not None:
        query = query.where(col(MapperTable.digest).in_(digests))
    if prefix is not None:
        query = query.where(col(MapperTable.digest).startswith(prefix, autoescape=True))
    if source is not None:
        query = query.where(col(MapperTable.source_slug) == slug(source))
    if target is not None:
        query = query.where(col(MapperTable.target_slug) == slug(target))
    if family is not None:
        query = query.where(col(MapperTable.family) == family)
    if state is not None:
        query = query.where(col(ArtifactTable.state) == state.value)
    found = [
        row
        for row in session.exec(query).all()
        if (source is None or answers_to(row[0].source_name, source))
        and (target is None or answers_to(row[0].target_name, target))
    ]
    extras = _Extras(session, [mapper for mapper, _ in found])
    return [_row(mapper, artifact, extras) for mapper, artifact in found]


def resolve(session: Session, ref: str) -> list[MapperRow]:
    """What a reference may mean: full digest, alias (`prod` or `@prod`), digest prefix, `source->target`."""
    exact = rows(session, digests=[ref])
    if exact:
        return exact
    alias = session.get(AliasTable, ref.removeprefix("@"))
    if alias is not None:
        return rows(session, digests=[alias.mapper_digest])
    if ref.startswith("@"):
        return []
    if is_digest_prefix(ref):
        return rows(session, prefix=ref)
    pair = split_pair(ref)
    return rows(session, source=pair[0], target=pair[1]) if pair else []


def at(session: Session, repo_id: str, revision: str | None) -> MapperRow | None:
    """The mapper of a repository: by its alias, else by the commit."""
    alias = session.get(AliasTable, f"{repo_id}@{revision}" if revision else repo_id)
    digest = alias.mapper_digest if alias is not None else None
    if digest is None and revision and is_digest_prefix(revision) and len(revision) >= 7:
        places = (
            select(LocationTable.mapper_digest)
            .where(col(LocationTable.repo_id) == repo_id)
            .where(col(LocationTable.commit).startswith(revision, autoescape=True))
        )
        digests = set(session.exec(places).all())
        digest = digests.pop() if len(digests) == 1 else None
    return rows(session, digests=[digest])[0] if digest else None


def health(session: Session) -> str:
    """The database's own check, and mappers without an artifact; "" where all is well."""
    connection = session.connection()
    if connection.dialect.name == "sqlite":
        found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
        if found != "ok":
            return f"the database is damaged: {found}"
        if connection.exec_driver_sql("PRAGMA foreign_key_check").first() is not None:
            return "a row points at one that is not there"
    whole = select(ArtifactTable.mapper_digest)
    half = session.exec(select(MapperTable.digest).where(col(MapperTable.digest).not_in(whole))).first()
    return f"mapper {half[:12]} has no artifact" if half else ""


def unreferenced(session: Session) -> list[ModelTable | CalibrationTable]:
    """Models and calibration sets that no mapper points at."""
    models = session.exec(
        select(ModelTable).where(
            ~select(MapperTable)
            .where(
                or_(
                    col(MapperTable.source_digest) == col(ModelTable.digest),
                    col(MapperTable.target_digest) == col(ModelTable.digest),
                )
            )
            .exists()
        )
    ).all()
    sets = session.exec(
        select(CalibrationTable).where(
            ~select(MapperTable)
            .where(col(MapperTable.calibration_digest) == col(CalibrationTable.digest))
            .exists()
        )
    ).all()
    return [*models, *sets]


class _Extras:
    """What stands around many mappers, one statement for each table."""

    def __init__(self, session: Session, mappers: Sequence[MapperTable]) -> None:
        self.models: dict[str, ModelTable] = {}
        self.calibrations: dict[str, CalibrationTable] = {}
        self.scores: dict[str, list[ScoreRecord]] = defaultdict(list)
        self.aliases: dict[str, list[str]] = defaultdict(list)
        self.locations: dict[str, list[HubLocation]] = defaultdict(list)
        if not mappers:
            return
        digests = [mapper.digest for mapper in mappers]
        sides = {m.source_digest for m in mappers} | {m.target_digest for m in mappers}
        for model in session.exec(select(ModelTable).where(col(ModelTable.digest).in_(sides))).all():
            self.models[model.digest] = model
        sets = {mapper.calibration_digest for mapper in mappers}
        for given in session.exec(
            select(CalibrationTable).where(col(CalibrationTable.digest).in_(sets))
        ).all():
            self.calibrations[given.digest] = given
        # Columns, not objects, and not validated again: ten thousand mappers have 360,000 scores.
        table = ScoreTable.__table__.c  # type: ignore[attr-defined]
        names = ("metric", "arm", "domain", "value", "low", "high", "n")
        scores = select(table.mapper_digest, *(table[name] for name in names))
        scores = scores.where(table.mapper_digest.in_(digests))
        for digest, *values in session.execute(scores.order_by(table.domain, table.metric, table.arm)):
            given_score = dict(zip(names, values, strict=True))
            self.scores[digest].append(ScoreRecord.model_construct(set(names), **given_score))
        aliases = select(AliasTable).where(col(AliasTable.mapper_digest).in_(digests))
        for alias in session.exec(aliases.order_by(col(AliasTable.name))).all():
            self.aliases[alias.mapper_digest].append(alias.name)
        places = select(LocationTable).where(col(LocationTable.mapper_digest).in_(digests))
        for place in session.exec(places.order_by(col(LocationTable.id))).all():
            self.locations[place.mapper_digest].append(
                HubLocation(repo_id=place.repo_id, commit=place.commit, pushed=place.pushed)
            )


def _row(mapper: MapperTable, artifact: ArtifactTable, extras: _Extras) -> MapperRow:
    source, target = extras.models[mapper.source_digest], extras.models[mapper.target_digest]
    calibration = extras.calibrations[mapper.calibration_digest]
    return MapperRow(
        digest=mapper.digest,
        family=mapper.family,
        support=mapper.support,
        k=mapper.k,
        regularization=mapper.regularization,
        regularization_convention=mapper.regularization_convention,
        exact_prefix=mapper.exact_prefix,
        source=ModelRecord(name=mapper.source_name, **source.model_dump()),
        target=ModelRecord(name=mapper.target_name, **target.model_dump()),
        calibration=CalibrationRecord(rows=mapper.calibration_rows, **calibration.model_dump()),
        created=mapper.created,
        path=artifact.path,
        size=artifact.size,
        state=State(artifact.state),
        state_reason=artifact.state_reason,
        changed=artifact.changed,
        scores=tuple(extras.scores[mapper.digest]),
        aliases=tuple(extras.aliases[mapper.digest]),
        locations=tuple(extras.locations[mapper.digest]),
    )
