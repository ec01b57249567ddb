"""`kvhub list`: which mappers there are, how good, and whether they may serve."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvhub.cli import output
from kvhub.cli.output import Column
from kvhub_registry.listing import STATES, Listed, quick_list

if TYPE_CHECKING:  # SQLModel takes longer than ten thousand mappers
    from kvhub_registry import MapperRow

COLUMNS = (
    Column("digest", "DIGEST"),
    Column("source", "SOURCE"),
    Column("target", "TARGET"),
    Column("family", "FAMILY", keep=9),
    Column("k", "K", right=True, keep=5),
    Column("lambda", "LAMBDA", right=True, keep=7),
    Column("calibration", "CALIBRATION", keep=8),
    Column("cosine", "COSINE", right=True, keep=2),
    Column("r2", "R2 K/V", right=True, keep=4),
    Column("gap", "GAP REC.", right=True, keep=3),
    Column("state", "STATE"),
    Column("size", "SIZE", right=True, keep=6),
)

FIELDS = (
    "digest",
    "source",
    "target",
    "family",
    "support",
    "k",
    "lambda",
    "lambda_convention",
    "exact_prefix",
    "calibration",
    "calibration_tokens",
    "attention_cosine",
    "r2_key",
    "r2_value",
    "gap_recovered",
    "top1",
    "state",
    "state_reason",
    "size",
    "created",
    "path",
)
"""Columns of `--format tsv`; `--format json` has these and more."""


@click.command()
@click.option("--source", metavar="MODEL", help="Only from this model (Qwen/Qwen3-8B, or qwen3-8b).")
@click.option("--target", metavar="MODEL", help="Only to this model.")
@click.option("--family", help="Only this family of mapper (ridge, ...).")
@click.option("--state", type=click.Choice(STATES), help="Only in this state.")
@output.format_option("table", "json", "tsv", "quiet")
def command(source: str | None, target: str | None, family: str | None, state: str | None, form: str) -> None:
    """List registered mappers.

    COSINE is the attention-output cosine; GAP REC. the share of the target's
    advantage over the source that the mapped cache keeps ("-" where it has
    none). Both on held-out text (kvhub eval); before that, R2 is the fit's own.
    """
    if form in ("json", "tsv"):
        records = [record(row) for row in _rows(source, target, family, state)]
        output.as_json(records) if form == "json" else output.tsv(FIELDS, records)
        return
    listed = _listed(source, target, family, state)
    if form == "quiet":
        for row in listed:
            click.echo(row.digest)
    elif listed:
        output.table(COLUMNS, [_cells(row) for row in listed])
    else:
        filtered = any((source, target, family, state))
        output.note(
            "no mapper matches" if filtered else "no mappers yet: kvhub fit makes one, kvhub pull fetches one"
        )


def _rows(source: str | None, target: str | None, family: str | None, state: str | None) -> list[MapperRow]:
    from kvhub.catalog import explained, open_registry

    with explained(), open_registry() as registry:
        return registry.list(source=source, target=target, family=family, state=state)


def _listed(source: str | None, target: str | None, family: str | None, state: str | None) -> list[Listed]:
    from kvhub.settings import Settings

    url = Settings.load().database_url
    if url.startswith("sqlite:///"):
        path = Path(url.removeprefix("sqlite:///"))
        found = quick_list(path, source=source, target=target, family=family, state=state)
        if found is not None:
            return found
    return [
        Listed(
            digest=row.digest,
            source=row.source.name,
            target=row.target.name,
            family=row.family,
            support=row.support,
            k=row.k,
            regularization=row.regularization,
            convention=row.regularization_convention,
            dataset=row.calibration.dataset,
            tokens=row.calibration.tokens,
            state=row.state.value,
            size=row.size,
            path=row.path,
            cosine=row.score("attention_cosine"),
            gap=row.score("gap_recovered"),
            r2_key=r2(row, "r2_key"),
            r2_value=r2(row, "r2_value"),
        )
        for row in _rows(source, target, family, state)
    ]


def record(row: MapperRow) -> dict[str, object]:
    """A mapper for programs: numbers as numbers, bytes, ISO 8601."""
    return {
        "digest": row.digest,
        "source": row.source.name,
        "target": row.target.name,
        "family": row.family,
        "support": row.support,
        "k": row.k,
        "lambda": row.regularization,
        "lambda_convention": row.regularization_convention,
        "exact_prefix": row.exact_prefix,
        "calibration": row.calibration.dataset,
        "calibration_tokens": row.calibration.tokens,
        "attention_cosine": row.score("attention_cosine"),
        "r2_key": r2(row, "r2_key"),
        "r2_value": r2(row, "r2_value"),
        "gap_recovered": row.score("gap_recovered"),
        "top1": row.score("top1"),
        "state": row.state.value,
        "state_reason": row.state_reason,
        "state_changed": output.instant(row.changed),
        "size": row.size,
        "created": output.instant(row.created),
        "path": row.path,
        "files_present": Path(row.path).is_dir(),
        "source_revision": row.source.revision,
        "target_revision": row.target.revision,
        "aliases": list(row.aliases),
        "locations": [location.model_dump() for location in row.locations],
        "scores": [score.model_dump() for score in row.scores],
    }


def r2(row: MapperRow, metric: str) -> float | None:
    """R2 on the evaluation's text; before an evaluation, the fit's own."""
    from kvhub.catalog import FIT_DOMAIN

    value = row.score(metric)
    return row.score(metric, domain=FIT_DOMAIN) if value is None else value


def _cells(row: Listed) -> dict[str, str]:
    cells = {
        "digest": row.digest[:12],
        "source": row.source,
        "target": row.target,
        "family": row.family if row.support == "full" else f"{row.family} {row.support}",
        "k": str(row.k),
        "lambda": output.strength(row.regularization, row.convention),
        "calibration": f"{row.dataset} {output.count(row.tokens)}",
        "cosine": output.number(row.cosine),
        "r2": f"{output.number(row.r2_key, 2)}/{output.number(row.r2_value, 2)}",
        "gap": output.number(row.gap),
        "state": row.state if os.path.isdir(row.path) else f"{row.state}, files gone",  # noqa: PTH112 - half the time
        "size": output.size(row.size),
    }
    return {key: output.clean(value) for key, value in cells.items()}
