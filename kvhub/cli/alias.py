"""`kvhub alias`: names that move, over digests that do not."""

from __future__ import annotations

import click

from kvhub.cli import output
from kvhub.cli.complete import MAPPER
from kvhub.cli.listed import say_lost
from kvhub.cli.output import Column
from kvhub.errors import BadInput
from kvhub_registry import MapperRow

COLUMNS = (
    Column("alias", "ALIAS"),
    Column("digest", "DIGEST"),
    Column("source", "SOURCE"),
    Column("target", "TARGET"),
    Column("state", "STATE"),
)


@click.command()
@click.argument("name", required=False)
@click.argument("mapper", required=False, type=MAPPER)
@click.option("--remove", is_flag=True, help="Forget NAME.")
@click.option("--why", default="", metavar="TEXT", help="Kept in the mapper's history.")
@output.format_option("table", "json")
def command(name: str | None, mapper: str | None, remove: bool, why: str, form: str) -> None:
    """List aliases; with NAME and MAPPER let @NAME mean that mapper, moving it where it exists.

    Every command that takes a mapper takes @NAME. A mapper with an alias is
    kept by kvhub gc. Names with a slash are repositories, noted by push and pull.
    """
    from kvhub.store import lifecycle
    from kvhub.strict_json import shown

    if name is None:
        if remove:
            raise BadInput("which alias?", "kvhub alias --remove NAME")
        _show(form)
    elif remove:
        if mapper is not None:
            raise BadInput("--remove takes a name alone", "kvhub alias --remove NAME")
        digest = lifecycle.unname(name, why=why or "removed")
        click.echo(f"@{name.removeprefix('@')} meant {digest[:12]}")
    elif mapper is None:
        raise BadInput(f"which mapper shall {shown(name, 80)!r} mean?", "kvhub alias NAME MAPPER")
    else:
        row, before = lifecycle.name(name, mapper, why=why or "named")
        was = f", was {before[:12]}" if before and before != row.digest else ""
        click.echo(f"@{name.removeprefix('@')} is {row.digest[:12]}{was}")


def _show(form: str) -> None:
    from kvhub.catalog import explained, reading_registry

    with explained(), reading_registry() as registry:
        rows = registry.list()
    pairs = [(alias, row) for row in rows for alias in row.aliases]
    found = sorted(pairs, key=lambda pair: pair[0])
    if form == "json":
        output.as_json([_record(alias, row) for alias, row in found])
    elif found:
        output.table(COLUMNS, [_record(alias, row) for alias, row in found])
    elif rows or not say_lost(()):
        output.note("no aliases yet: kvhub alias NAME MAPPER makes one")


def _record(alias: str, row: MapperRow) -> dict[str, str]:
    cells = {
        "alias": alias if "/" in alias else f"@{alias}",
        "digest": row.digest[:12],
        "source": row.source.name,
        "target": row.target.name,
        "state": row.state.value,
    }
    return {key: output.clean(value) for key, value in cells.items()}
