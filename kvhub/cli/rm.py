"""`kvhub rm`: forget a mapper and delete its files."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from kvhub.catalog import files_of, find
from kvhub.cli import output
from kvhub.cli.complete import MAPPER
from kvhub.errors import BadInput

if TYPE_CHECKING:
    from kvhub_registry import MapperRow


@click.command()
@click.argument("mappers", nargs=-1, required=True, type=MAPPER, metavar="MAPPER...")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def command(mappers: tuple[str, ...], yes: bool) -> None:
    """Remove each MAPPER from the registry, and its files from the store: all, or none.

    Shards that another mapper has stay with that one; all others are free at once.
    Files outside the store (kvhub fit --output DIR) stay where they are. A copy
    on the Hub stays, too.
    """
    rows = list({row.digest: row for row in map(find, mappers)}.values())
    if not yes:
        if not sys.stdin.isatty():
            raise BadInput("nobody to ask on this terminal", "add --yes")
        for row in rows[1:] and rows:
            output.note(_what(row))
        what = f"mapper {_what(rows[0])}" if len(rows) == 1 else f"these {len(rows)} mappers"
        click.confirm(output.clean(f"Remove {what}?"), abort=True, err=True)
    from kvhub.hub.store import wherever
    from kvhub.settings import Settings
    from kvhub.store.links import Links
    from kvhub.store.removal import remove_all

    places = {row.digest: wherever(files_of(row)) for row in rows}
    there = {digest for digest, place in places.items() if place.exists()}
    links = Links(Settings.load())
    sizes = {digest: links.freed(place) for digest, place in places.items()}
    stay = remove_all(rows)
    freed = sum(size for digest, size in sizes.items() if digest not in stay)
    for row in rows:
        click.echo(output.clean(f"removed {_what(row)}"))
        if row.digest in stay:
            output.note(f"its files stay in {places[row.digest]}")
        elif row.digest not in there:
            output.note("its files were gone already")
    if there - stay:
        rest = "; other mappers have the rest" if len(rows) == 1 and freed < rows[0].size else ""
        output.note(f"{output.size(freed)} freed{rest}")


def _what(row: MapperRow) -> str:
    return f"{row.digest[:12]} {row.source.name} -> {row.target.name} ({row.state}, {output.size(row.size)})"
