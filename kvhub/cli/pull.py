"""`kvhub pull`: fetch a mapper."""

from __future__ import annotations

import click

from kvhub.cli import output


@click.command()
@click.argument("repository", metavar="ORG/NAME[@REVISION]")
def command(repository: str) -> None:
    """Fetch a mapper from the Hub, check every byte, and register it.

    REVISION is a branch, a tag or a commit. The mapper is ready only where the
    evidence that comes with it passes the gate here; else it is a draft.
    """
    from kvhub.hub.client import split
    from kvhub.hub.pull import fetch

    row = fetch(*split(repository))
    click.echo(output.clean(f"{row.digest}  {row.source.name} -> {row.target.name}  {row.state}  {row.path}"))
    output.note(f"{row.state}: {row.state_reason}")
