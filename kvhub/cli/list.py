"""`kvhub list`: which mappers there are, how good, and whether they may serve."""

from __future__ import annotations

from pathlib import Path

import click

from kvhub.catalog import FIT_DOMAIN, explained, open_registry
from kvhub.cli import output
from kvhub.cli.output import Column
from kvhub_registry import MapperRow, State

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
@click.option("--state", type=click.Choice([state.value for state in State]), help="Only in this state.")
@output.format_option("table", "json", "tsv", "quiet")
def command(source: str | None, target: str | None, family: str | None, state: str | None, form: str) -> None:
    """List registered mappers.

    COSINE is the attention-output cosine; GAP REC. the share of the target's
    advantage over the source that the mapped cache keeps ("-" where it has
    none). Both on held-out text (kvhub eval); before that, R2 is the fit's own.
    """
    with explained(), open_registry() as registry:
        rows = registry.list(source=source, target=target, family=family, state=state)
    if form == "quiet":
        for row in rows:
            click.echo(row.digest)
    elif form == "json":
        output.as_json([record(row) for row in rows])
    elif form == "tsv":
        output.tsv(FIELDS, [record(row) for row in rows])
    elif rows:
        output.table(COLUMNS, [_cells(row) for row in rows])
    else:
        filtered = any((source, target, family, state))
        output.note(
            "no mapper matches" if filtered else "no mappers yet: kvhub fit makes one, kvhub pull fetches one"
        )


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
    value = row.score(metric)
    return row.score(metric, domain=FIT_DOMAIN) if value is None else value


def _cells(row: MapperRow) -> dict[str, str]:
    pair = f"{output.number(r2(row, 'r2_key'), 2)}/{output.number(r2(row, 'r2_value'), 2)}"
    cells = {
        "digest": row.digest[:12],
        "source": row.source.name,
        "target": row.target.name,
        "family": row.family if row.support == "full" else f"{row.family} {row.support}",
        "k": str(row.k),
        "lambda": output.strength(row.regularization, row.regularization_convention),
        "calibration": f"{row.calibration.dataset} {output.count(row.calibration.tokens)}",
        "cosine": output.number(row.score("attention_cosine")),
        "r2": pair,
        "gap": output.number(row.score("gap_recovered")),
        "state": row.state.value if Path(row.path).is_dir() else f"{row.state.value}, files gone",
        "size": output.size(row.size),
    }
    return {key: output.clean(value) for key, value in cells.items()}
