"""Artifacts and the registry together: register, judge, find (`store.removal` removes). Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.errors import AccessDenied, BadInput, Corrupt, Incompatible, KvhubError, NotFound, Unreachable
from kvhub.settings import Settings
from kvhub_registry import (
    Ambiguous,
    BadAddress,
    CalibrationRecord,
    Damaged,
    Denied,
    EventRecord,
    HubLocation,
    MapperRecord,
    MapperRow,
    ModelRecord,
    NotRegistered,
    RegistryError,
    ScoreRecord,
    State,
    TooNew,
    Unavailable,
)
from kvhub_registry.listing import FIT_DOMAIN

if TYPE_CHECKING:  # listing needs none of these, and they cost a tenth of a second
    from kvhub.artifact.manifest import Manifest
    from kvhub.evaluation.evidence import Evidence
    from kvhub.model.identity import ModelIdentity
    from kvhub_registry import Registry

PROPOSAL = "refs/pr/"
"""How the revisions of a Hub begin that hold what somebody proposes to a repository."""

_MEANING: tuple[tuple[type[RegistryError], type[KvhubError]], ...] = (
    (BadAddress, BadInput),
    (Ambiguous, BadInput),
    (NotRegistered, NotFound),
    (Denied, AccessDenied),
    (Unavailable, Unreachable),
    (Damaged, Corrupt),
    (TooNew, Incompatible),
)


def as_kvhub_error(error: RegistryError) -> KvhubError:
    """The command line's error for one of the registry's."""
    for kind, meaning in _MEANING:
        if isinstance(error, kind):
            return meaning(error.message, error.hint)
    return KvhubError(error.message, error.hint)


@contextmanager
def explained() -> Iterator[None]:
    """Registry errors as `KvhubError`s."""
    try:
        yield
    except RegistryError as error:
        raise as_kvhub_error(error) from error


def open_registry(settings: Settings | None = None, *, read_only: bool = False) -> Registry:
    """The registry of this user (`KVHUB_DATABASE_URL`, else SQLite in `KVHUB_HOME`).

    The caller closes it. Errors: `BadInput`, `AccessDenied`, `Corrupt`,
    `Incompatible`, `Unreachable`. Its methods raise `RegistryError`s, which the
    command line understands; libraries wrap them in `explained()`.
    """
    from kvhub_registry import Registry  # SQLModel takes longer than reading one mapper

    settings = settings or Settings.load()
    with explained():
        return Registry.open(settings.database_file or settings.database_url, read_only=read_only)


def reading_registry(settings: Settings | None = None) -> Registry:
    """The registry for what only reads: made or upgraded as by `open_registry`, but read as it is where the
    home may not be written (somebody else's, a read-only mount).
    """
    settings = settings or Settings.load()
    database = settings.database_file
    fixed = database is not None and database.is_file() and not writable(database)
    return open_registry(settings, read_only=fixed)


def writable(path: Path) -> bool:
    """Whether a file may be changed, and others made beside it."""
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def register(directory: Path, manifest: Manifest, settings: Settings | None = None) -> None:
    """Put a written artifact into the registry, as a draft, in one transaction.

    In the store, its weight files become one with equal ones of other mappers.
    """
    settings = settings or Settings.load()
    if inside(directory, settings.mappers):
        from kvhub.store.blobs import share

        share(directory, manifest.files, settings)
    with explained(), open_registry(settings) as registry:
        registry.register(to_record(directory, manifest), fit_scores(manifest))


def record_evidence(
    manifest: Manifest, evidence: Evidence, *, why: str, settings: Settings | None = None
) -> State:
    """Store the scores of a registered mapper with its state: ready where the verdict passed.

    Both in one transaction. A retired mapper stays retired (`kvhub promote` brings it back).
    Returns the state that now holds. Errors: `Corrupt` where the evidence is another
    mapper's, `NotFound` where the mapper is not registered.
    """
    digest = manifest.digest
    if evidence.mapper != digest:
        raise Corrupt(f"the evidence is of mapper {evidence.mapper[:12]}, not of {digest[:12]}")
    state = State.READY if evidence.verdict.passed else State.DRAFT
    with explained(), open_registry(settings) as registry:
        return registry.judge(digest, all_scores(manifest, evidence), state, why)


def record_location(
    digest: str, location: HubLocation, settings: Settings | None = None, *, revision: str | None = None
) -> None:
    """Note where a mapper is on the Hub, under names that find it again without the Hub.

    `org/name@revision` where it came by a branch or a tag; `org/name` where it came without a
    revision, or where that name meant nothing yet. A proposal (`refs/pr/N`) is no place before it is merged:
    it has the name with its revision, and neither location nor `org/name`.
    """
    why = f"{'pushed' if location.pushed else 'pulled'} {location.commit[:8]}"
    with explained(), open_registry(settings) as registry:
        if revision and revision.startswith(PROPOSAL):
            registry.set_alias(f"{location.repo_id}@{revision}", digest, why)
            return
        registry.add_location(digest, location)
        if revision and not location.commit.startswith(revision):
            registry.set_alias(f"{location.repo_id}@{revision}", digest, why)
        if not revision or registry.at(location.repo_id) is None:
            registry.set_alias(location.repo_id, digest, why)


def find(ref: str, settings: Settings | None = None) -> MapperRow:
    """The mapper that `ref` means: digest or its beginning, alias, `source->target`.

    Errors: `NotFound`; `BadInput` where several fit (the hint lists them).
    """
    return look_up(ref, settings)[0]


def look_up(ref: str, settings: Settings | None = None) -> tuple[MapperRow, list[EventRecord]]:
    """`find`, and what happened to the mapper, oldest first: quickly from SQLite where that can be."""
    from kvhub_registry.quick import quick_get

    settings = settings or Settings.load()
    database = settings.database_file
    quick = quick_get(database, ref) if database is not None else None
    if quick is not None:
        return quick
    with explained(), reading_registry(settings) as registry:
        try:
            row = registry.get(ref)
        except NotRegistered as error:
            from kvhub.store.lost import lost

            error.hint = lost(settings, (row.digest for row in registry.list())) or error.hint
            if is_directory(ref):
                error.hint = f"./{ref} names the directory"
            raise
        return row, registry.history(row.digest)


def directory_of(ref: str, settings: Settings | None = None) -> Path:
    """The artifact directory that `ref` names: a path, or a registered mapper's. Errors: `NotFound`."""
    return local_directory(ref) or demand_files(find(ref, settings), settings)


def local_directory(ref: str) -> Path | None:
    """The directory that `ref` is the path of; None where it is a name."""
    local = Path(ref).expanduser()
    return local.absolute() if ("/" in ref or ref in (".", "..")) and is_directory(local) else None


def is_directory(text: str | Path) -> bool:
    """Whether a text is the path of a directory; not where it is longer than a path may be."""
    return os.path.isdir(text)  # noqa: PTH112 - a Path raises


def demand_files(row: MapperRow, settings: Settings | None = None) -> Path:
    """`files_of`, where they are there. Errors: `NotFound`, with the way to get them."""
    directory = files_of(row, settings)
    if not directory.is_dir():
        raise NotFound(
            f"the files of mapper {row.digest[:12]} are gone: neither at {row.path} nor in this store",
            _way_to_files(row, settings or Settings.load()),
        )
    return directory


def _way_to_files(row: MapperRow, settings: Settings) -> str:
    """What to do where a registered mapper's files are gone, or on another machine of a shared registry."""
    from kvhub.hub.store import aside

    if aside(settings.mappers / row.digest).is_dir():
        return "their removal was killed: kvhub gc puts them back, kvhub rm finishes it"
    if row.locations:
        place = row.locations[-1]
        return f"kvhub pull {place.repo_id}@{place.commit[:12]} fetches them, kvhub rm forgets the mapper"
    proposed = next((name for name in row.aliases if f"@{PROPOSAL}" in name), None)
    if proposed:
        return f"kvhub pull {proposed} fetches them, kvhub rm forgets the mapper"
    if not settings.database_url.startswith("sqlite"):
        return (
            f"the registry is shared: the machine that has them can kvhub push, or copy them to "
            f"{settings.mappers / row.digest}"
        )
    return f"it was never on the Hub; kvhub rm {row.digest[:12]} forgets it"


def files_of(row: MapperRow, settings: Settings | None = None) -> Path:
    """Where a mapper's files are: this store, else the registered path.

    The path alone would lead from a home that was copied, or a team's registry, to another home's files.
    """
    here = (settings or Settings.load()).mappers / row.digest
    return here if here.is_dir() else Path(row.path)


def demote(digest: str, why: str, settings: Settings | None = None) -> bool:
    """Make a registered mapper a draft (its files no longer verify); False where it is not registered."""
    with explained(), open_registry(settings) as registry:
        try:
            registry.set_state(digest, State.DRAFT, why, keep_retired=True)
        except NotRegistered:
            return False
        return True


def to_record(directory: Path, manifest: Manifest) -> MapperRecord:
    """What the registry keeps of a manifest. Errors: `Corrupt` for a date that is none."""
    try:
        created = datetime.fromisoformat(manifest.created)
    except ValueError:
        raise Corrupt(f"manifest.json: {manifest.created[:40]!r} is not a date") from None
    return MapperRecord(
        digest=manifest.digest,
        family=manifest.family,
        support=manifest.support,
        k=manifest.k,
        regularization=manifest.regularization,
        regularization_convention=manifest.regularization_convention,
        exact_prefix=manifest.exact_prefix,
        source=_model(manifest.source),
        target=_model(manifest.target),
        calibration=CalibrationRecord(
            digest=manifest.calibration.digest,
            dataset=manifest.calibration.dataset,
            revision=manifest.calibration.revision,
            tokens=manifest.calibration.tokens,
            rows=manifest.calibration.rows,
        ),
        created=created.astimezone(UTC) if created.tzinfo else created.replace(tzinfo=UTC),
        path=str(directory.absolute()),
        size=manifest.size,
    )


def fit_scores(manifest: Manifest) -> list[ScoreRecord]:
    """The fit's own R2, averaged over target layers; without an interval."""
    fit = manifest.fit_scores
    means = {
        metric: sum(values) / len(values)
        for metric, values in (("r2_key", fit.r2_key), ("r2_value", fit.r2_value))
        if values
    }
    return [
        ScoreRecord(
            metric=metric, arm="mapped", domain=FIT_DOMAIN, value=mean, low=mean, high=mean, n=fit.rows
        )
        for metric, mean in means.items()
    ]


def _model(identity: ModelIdentity) -> ModelRecord:
    return ModelRecord(
        digest=identity.digest,
        name=identity.name,
        revision=identity.revision,
        architecture=identity.architecture,
        dtype=identity.dtype,
        num_layers=identity.geometry.num_layers,
        num_kv_heads=identity.geometry.num_kv_heads,
        head_dim=identity.geometry.head_dim,
    )


def all_scores(manifest: Manifest, evidence: Evidence) -> list[ScoreRecord]:
    """What the registry keeps of an evaluation: its scores, and those of the fit that it does not have."""
    measured = [ScoreRecord(**score.model_dump()) for score in evidence.scores]
    table = {(score.metric, score.arm, score.domain): score for score in [*fit_scores(manifest), *measured]}
    return list(table.values())


def inside(path: Path, store: Path) -> bool:
    """Whether a directory is one of the store's own."""
    return path.absolute().parent == store.absolute() and not path.is_symlink()
