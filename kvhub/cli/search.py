"""`kvhub search`: find mappers on the Hub, or here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from kvhub.cli import output
from kvhub.cli.listed import listed
from kvhub.cli.output import Column
from kvhub.errors import BadInput
from kvhub_registry.listing import Listed

if TYPE_CHECKING:
    from kvhub.hub.search import Hit

COLUMNS = (
    Column("repository", "REPOSITORY"),
    Column("source", "SOURCE"),
    Column("target", "TARGET"),
    Column("family", "FAMILY", keep=3),
    Column("top1", "TOP-1", right=True, keep=1),
    Column("gap", "GAP REC.", right=True, keep=2),
    Column("downloads", "DOWNLOADS", right=True, keep=4),
    Column("modified", "MODIFIED", keep=5),
    Column("here", "HERE"),
)


_LONGEST = 500
"""Letters: what is asked for stands in an address."""


@click.command()
@click.argument("text", required=False)
@click.option("--source", metavar="MODEL", help="Only from this model.")
@click.option("--target", metavar="MODEL", help="Only to this model.")
@click.option("--family", help="Only this family of mapper (ridge, ...).")
@click.option("--author", metavar="ORG", help="Only repositories of this user or organisation.")
@click.option(
    "--local", "here", is_flag=True, help="Ask the registry, not the Hub; so does HF_HUB_OFFLINE=1."
)
@output.format_option("table", "json", "quiet")
def command(
    text: str | None,
    source: str | None,
    target: str | None,
    family: str | None,
    author: str | None,
    here: bool,
    form: str,
) -> None:
    """Find mappers on the Hub by model, with one request.

    Scores are the authors' own; kvhub pull has ours decide. HERE is the state
    of the same mapper in the registry.
    """
    for given in (text, source, target, family, author):
        if given is not None and len(given) > _LONGEST:
            raise BadInput(
                f"{output.clean(given[:40])}... is too long to search for", f"{_LONGEST} letters at most"
            )
    if here or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        found = listed(source=source, target=target, family=family, text=text)
        records = [_local(one) for one in found if author is None or _by(author, one)]
    else:
        from kvhub.hub.search import search

        known = {one.digest: one.state for one in listed()}
        hits = search(
            text,
            source=source,
            target=target,
            family=family,
            author=author,
            known=known,
            note=output.note,
        )
        records = [_remote(hit) for hit in hits]
    if form == "json":
        output.as_json_lines(records)
    elif form == "quiet":
        for record in records:
            click.echo(output.clean(str(record["repository"] or record["digest"])))
    elif records:
        output.table(COLUMNS, [_cells(record) for record in records])
    else:
        output.note("no mapper matches")


def _remote(hit: Hit) -> dict[str, object]:
    return {
        "repository": hit.repo_id,
        "commit": hit.commit,
        "digest": hit.digest,
        "source": hit.source,
        "target": hit.target,
        "family": hit.family,
        "top1": hit.scores.get("top1"),
        "gap": hit.scores.get("gap_recovered"),
        "downloads": hit.downloads,
        "modified": None if hit.modified is None else output.instant(hit.modified),
        "gated": hit.gated,
        "here": hit.here,
    }


def _by(author: str, one: Listed) -> bool:
    return any(place.repo_id.startswith(f"{author}/") for place in one.locations)


def _local(one: Listed) -> dict[str, object]:
    place = one.locations[-1] if one.locations else None
    return {
        "repository": place.repo_id if place else None,
        "commit": place.commit if place else None,
        "digest": one.digest,
        "source": one.source,
        "target": one.target,
        "family": one.family,
        "top1": one.top1,
        "gap": one.gap,
        "downloads": None,
        "modified": one.created,
        "gated": None,
        "here": one.state,
    }


def _cells(record: dict[str, object]) -> dict[str, str]:
    def shown(key: str) -> str:
        value = record[key]
        if isinstance(value, float):
            return f"{value:.3f}"
        return "-" if value is None else output.clean(str(value))

    cells = {column.key: shown(column.key) for column in COLUMNS}
    cells["modified"] = cells["modified"][:10]
    if record["repository"] is None:
        cells["repository"] = str(record["digest"])[:12]
    return cells
