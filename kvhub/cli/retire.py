"""`kvhub retire`: take a mapper out of service."""

from __future__ import annotations

import click

from kvhub.cli import output
from kvhub.cli.complete import MAPPER


@click.command()
@click.argument("mapper", type=MAPPER)
@click.option("--why", required=True, metavar="TEXT", help="Kept in its history, and shown beside its state.")
def command(mapper: str, why: str) -> None:
    """Retire MAPPER: nothing serves it any more, and no pull or eval brings it back.

    Its files stay until kvhub gc; kvhub promote makes it ready again.
    """
    from kvhub.errors import BadInput
    from kvhub.store.lifecycle import retire

    if not why.strip():
        raise BadInput("a retired mapper needs a reason", 'for example --why "the source was retrained"')
    row = retire(mapper, why=why)
    click.echo(output.clean(f"{row.digest}  {row.source.name} -> {row.target.name}  {row.state}: {why}"))
    names = [name for name in row.aliases if "/" not in name]
    if names:
        output.note(f"still named {', '.join('@' + name for name in names)}: kvhub alias moves a name")
