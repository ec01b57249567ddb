"""Registered mappers as commands list them: quickly from SQLite where that can be, else by the registry."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from kvhub_registry.listing import FIT_DOMAIN, Listed, Place, quick_list

if TYPE_CHECKING:  # SQLModel takes longer than ten thousand mappers
    from kvhub.settings import Settings
    from kvhub_registry import MapperRow


def listed(
    *,
    source: str | None = None,
    target: str | None = None,
    family: str | None = None,
    state: str | None = None,
    text: str | None = None,
    quiet: bool = False,
) -> list[Listed]:
    """The mappers that pass every filter, by target, source and date (newest first).

    text: part of a model's name, the digest, an alias or a repository, in any case.
    Where nothing is found although mappers lie here without a row, a note says so, unless `quiet`.
    """
    from kvhub.settings import Settings

    settings = Settings.load()
    found = _read(settings, source, target, family, state, text)
    if not found and not quiet:
        filtered = any((source, target, family, state, text))
        say_lost(one.digest for one in (listed(quiet=True) if filtered else found))
    return found


def _read(
    settings: Settings,
    source: str | None,
    target: str | None,
    family: str | None,
    state: str | None,
    text: str | None,
) -> list[Listed]:
    database = settings.database_file
    if database is not None:
        found = quick_list(database, source=source, target=target, family=family, state=state, text=text)
        if found is not None:
            return found
    from kvhub.catalog import explained, reading_registry

    with explained(), reading_registry(settings) as registry:
        rows = registry.list(source=source, target=target, family=family, state=state)
    if text:
        from kvhub.hub.search import local

        rows = local(rows, text)
    return [of_row(row) for row in rows]


def of_row(row: MapperRow) -> Listed:
    """One line of the list for the registry's whole row."""
    from kvhub.cli.output import instant

    return Listed(
        digest=row.digest,
        source=row.source.name,
        target=row.target.name,
        family=row.family,
        support=row.support,
        k=row.k,
        regularization=row.regularization,
        convention=row.regularization_convention,
        exact_prefix=row.exact_prefix,
        dataset=row.calibration.dataset,
        tokens=row.calibration.tokens,
        state=row.state.value,
        state_reason=row.state_reason,
        changed=instant(row.changed),
        size=row.size,
        path=row.path,
        created=instant(row.created),
        source_revision=row.source.revision,
        target_revision=row.target.revision,
        cosine=row.score("attention_cosine"),
        gap=row.score("gap_recovered"),
        top1=row.score("top1"),
        r2_key=_r2(row, "r2_key"),
        r2_value=_r2(row, "r2_value"),
        aliases=row.aliases,
        locations=tuple(Place(place.repo_id, place.commit, place.pushed) for place in row.locations),
    )


def record(one: Listed, here: Collection[str] | None = None) -> dict[str, object]:
    """A mapper for programs: numbers as numbers, bytes, ISO 8601. here: `stored()`, for many."""
    return {
        "digest": one.digest,
        "source": one.source,
        "target": one.target,
        "family": one.family,
        "support": one.support,
        "k": one.k,
        "lambda": one.regularization,
        "lambda_convention": one.convention,
        "exact_prefix": one.exact_prefix,
        "calibration": one.dataset,
        "calibration_tokens": one.tokens,
        "attention_cosine": one.cosine,
        "r2_key": one.r2_key,
        "r2_value": one.r2_value,
        "gap_recovered": one.gap,
        "top1": one.top1,
        "state": one.state,
        "state_reason": one.state_reason,
        "state_changed": one.changed,
        "size": one.size,
        "created": one.created,
        "path": one.path,
        "files_present": present(one, stored() if here is None else here),
        "source_revision": one.source_revision,
        "target_revision": one.target_revision,
        "aliases": one.aliases,
        "locations": [place._asdict() for place in one.locations],
    }


def stored() -> set[str]:
    """Digests whose files are in this machine's store, by one look into it."""
    from kvhub.settings import Settings

    try:
        return set(os.listdir(Settings.load().mappers))  # noqa: PTH208 - names, ten thousand of them
    except OSError:
        return set()


def say_lost(known: Iterable[str]) -> bool:
    """A note where mappers are here that the registry does not name; known: digests of all that it names."""
    from kvhub.cli.output import note
    from kvhub.settings import Settings
    from kvhub.store.lost import lost

    said = lost(Settings.load(), known)
    if said:
        note(said)
    return bool(said)


def present(one: Listed, here: Collection[str]) -> bool:
    """Whether its files are in this store, or where the registry says. here: `stored()`."""
    return one.digest in here or os.path.isdir(one.path)  # noqa: PTH112 - half the time of a Path


def _r2(row: MapperRow, metric: str) -> float | None:
    """R2 on the evaluation's text; before an evaluation, the fit's own."""
    value = row.score(metric)
    return row.score(metric, domain=FIT_DOMAIN) if value is None else value
