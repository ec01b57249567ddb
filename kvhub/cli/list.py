"""`kvhub list`: which mappers there are, how good, and whether they may serve."""

from __future__ import annotations

import click

from kvhub.cli import output
from kvhub.cli.listed import listed, present, record, say_lost, stored
from kvhub.cli.output import Column
from kvhub_registry.listing import STATES, Listed

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
"""Columns of `--format tsv`; `--format json` has these and more; `kvhub info` has every score."""


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
    found = listed(source=source, target=target, family=family, state=state, quiet=True)
    here = stored()
    if form == "json":
        output.as_json_lines(record(one, here) for one in found)
    elif form == "tsv":
        output.tsv(FIELDS, [record(one, here) for one in found])
    elif form == "quiet":
        for one in found:
            click.echo(one.digest)
    elif found:
        output.table(COLUMNS, [_cells(one, here) for one in found])
    filtered = any((source, target, family, state))
    if found and filtered:
        return
    missed = say_lost(one.digest for one in (listed(quiet=True) if filtered else found))
    if form == "table" and not found and (filtered or not missed):
        output.note(
            "no mapper matches" if filtered else "no mappers yet: kvhub fit makes one, kvhub pull fetches one"
        )


def _cells(row: Listed, here: set[str]) -> dict[str, str]:
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
        "state": row.state if present(row, here) else f"{row.state}, files gone",
        "size": output.size(row.size),
    }
    return {key: output.clean(value) for key, value in cells.items()}
