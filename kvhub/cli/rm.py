"""`kvhub rm`: forget a mapper and delete its files."""

from __future__ import annotations

import sys

import click

from kvhub.catalog import files_of, find
from kvhub.cli import output
from kvhub.cli.complete import MAPPER
from kvhub.errors import BadInput


@click.command()
@click.argument("mapper", type=MAPPER)
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def command(mapper: str, yes: bool) -> None:
    """Remove MAPPER from the registry, then its files from the store.

    Shards that another mapper has stay with that one; all others are free at once.
    Files outside the store (kvhub fit --output DIR) stay where they are. A copy
    on the Hub stays, too.
    """
    row = find(mapper)
    what = f"{row.digest[:12]} {row.source.name} -> {row.target.name} ({row.state}, {output.size(row.size)})"
    if not yes:
        if not sys.stdin.isatty():
            raise BadInput("nobody to ask on this terminal", "add --yes")
        click.confirm(output.clean(f"Remove mapper {what}?"), abort=True, err=True)
    from kvhub.settings import Settings
    from kvhub.store.links import Links
    from kvhub.store.removal import remove

    directory = files_of(row)
    there = directory.exists()
    freed = Links(Settings.load()).freed(directory)
    deleted = remove(row)
    click.echo(output.clean(f"removed {what}"))
    if not deleted:
        output.note(f"its files stay in {directory}")
    elif not there:
        output.note("its files were gone already")
    elif freed < row.size:
        output.note(f"{output.size(freed)} freed; other mappers have the rest")
    else:
        output.note(f"{output.size(freed)} freed")
