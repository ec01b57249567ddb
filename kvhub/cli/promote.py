"""`kvhub promote`: let a mapper serve."""

from __future__ import annotations

import click

from kvhub.cli import output
from kvhub.cli.complete import MAPPER


@click.command()
@click.argument("mapper", type=MAPPER)
@click.option("--as", "alias", metavar="NAME", help="Move this alias to it, too (@prod).")
@click.option("--why", default="promoted", show_default=True, help="Kept in its history.")
def command(mapper: str, alias: str | None, why: str) -> None:
    """Make MAPPER ready, also one that was retired.

    Every byte is verified and the gate judges its evidence again; there is no
    way around the gate.
    """
    from kvhub.store.lifecycle import alias_name, name, promote

    if alias is not None:
        alias_name(alias)
    row = promote(mapper, why=why)
    click.echo(output.clean(f"{row.digest}  {row.source.name} -> {row.target.name}  {row.state}"))
    if alias is not None:
        _, before = name(alias, row.digest, why=why)
        was = f", was {before[:12]}" if before and before != row.digest else ""
        click.echo(f"@{alias.removeprefix('@')} is {row.digest[:12]}{was}")
