"""`kvhub register`: mappers that are on disk, back into the registry."""

from __future__ import annotations

import click

from kvhub.cli import output
from kvhub.errors import KvhubError


@click.command()
@click.argument("mappers", metavar="[DIRECTORY|DIGEST]...", nargs=-1)
def command(mappers: tuple[str, ...]) -> None:
    """Put mappers that are on disk back into the registry.

    Without arguments every one in the store that the registry does not name: after
    it was lost, or after a command was killed. Every byte is verified, and the
    evidence that stands beside a mapper is judged here: ready where it passes the
    gate, else a draft. Aliases and retirements of a lost registry do not come back.
    """
    from kvhub.settings import Settings
    from kvhub.store.recover import directory_named, put_back, unregistered

    settings = Settings.load()
    found = [directory_named(text, settings) for text in mappers] or unregistered(settings)
    failed: KvhubError | None = None
    for directory in found:
        try:
            row = put_back(directory, settings)
        except KvhubError as error:  # the others all the same; the first one is the command's
            if failed is not None:
                output.note(f"{directory.name}: {error.message}")
            failed = failed or error
            continue
        names = f"{row.source.name} -> {row.target.name}"
        click.echo(output.clean(f"{row.digest}  {names}  {row.state}: {row.state_reason}"))
    if failed is not None:
        raise failed
    if not found:
        output.note("every mapper in the store is registered")
