"""`kvhub lock`: pin what a project uses."""

from __future__ import annotations

from pathlib import Path

import click

from kvhub.cli import output
from kvhub.cli.complete import MAPPER
from kvhub.errors import BadInput


@click.command()
@click.argument("mappers", nargs=-1, type=MAPPER, metavar="[MAPPER]...")
@click.option(
    "--output",
    "-o",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("kvhub.lock"),
    show_default=True,
    help="Where to write it.",
)
def command(mappers: tuple[str, ...], path: Path) -> None:
    """Write kvhub.lock: repository, commit and digests of each MAPPER (default: all that are ready).

    kvhub pull --locked fetches exactly these, and kvhub gc keeps them for as
    long as the file exists.
    """
    from kvhub.artifact.read import read_manifest
    from kvhub.catalog import directory_of, explained, find, reading_registry
    from kvhub.files import check_output
    from kvhub.hub.lockfile import make_lock, write_lock
    from kvhub.settings import Settings
    from kvhub.store.lost import lost
    from kvhub.store.roots import remember

    if mappers:
        rows = [find(ref) for ref in mappers]
    else:
        with explained(), reading_registry() as registry:
            every = registry.list()
        rows = [row for row in every if row.state.value == "ready" and row.locations]
        if not rows:
            hint = lost(Settings.load(), (row.digest for row in every))
            raise BadInput(
                "no mapper is ready and on the Hub", hint or "kvhub push publishes one; or name mappers"
            )
    lock = make_lock([(row, read_manifest(directory_of(row.digest))) for row in rows])
    check_output(path)
    # First the note: a lock file that gc does not know of would keep nothing.
    remember(path, Settings.load(), [entry.digest for entry in lock.mappers])
    write_lock(path, lock)
    for entry in lock.mappers:
        click.echo(
            output.clean(
                f"{entry.digest[:12]}  {entry.source} -> {entry.target}  {entry.place}@{entry.commit[:8]}"
            )
        )
    output.note(f"{path}: {len(lock.mappers)} mapper{'s' if len(lock.mappers) > 1 else ''}")
