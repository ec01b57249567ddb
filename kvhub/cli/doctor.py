"""`kvhub doctor`: is everything in order, and if not, what to do."""

from __future__ import annotations

import click

from kvhub.cli import output
from kvhub.cli.output import Column

COLUMNS = (
    Column("result", ""),
    Column("name", "CHECK"),
    Column("found", "FOUND"),
    Column("advice", "ADVICE"),
)


@click.command()
@click.option("--no-hub", is_flag=True, help="Do not ask the Hub.")
@output.format_option("table", "json")
def command(no_hub: bool, form: str) -> int:
    """Check settings, disk, registry, store, Hub access and versions, with advice.

    Exit code 1 where something fails; a warning is no failure.
    """
    from kvhub.store.health import examine

    found = list(examine(ask_hub=not no_hub))
    if form == "json":
        output.as_json(
            [
                {"check": item.name, "result": item.result, "found": item.found, "advice": item.advice}
                for item in found
            ]
        )
    else:
        output.table(
            COLUMNS,
            [
                {
                    "result": item.result,
                    "name": item.name,
                    "found": output.clean(item.found),
                    "advice": output.clean(item.advice),
                }
                for item in found
            ],
        )
    return int(any(item.result == "FAILS" for item in found))
