"""`kvhub lock`: pin what a project uses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvhub.cli import output
from kvhub.cli.complete import MAPPER
from kvhub.errors import BadInput

if TYPE_CHECKING:
    from kvhub.settings import Settings
    from kvhub_registry import MapperRow


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
    long as the file exists. Without names, mappers that are on no Hub, or whose
    files are on another machine of a shared registry, are left out; a note says which.
    """
    from kvhub.artifact.read import read_manifest
    from kvhub.catalog import demand_files, explained, find, reading_registry
    from kvhub.files import check_output
    from kvhub.hub.lockfile import make_lock, write_lock
    from kvhub.settings import Settings
    from kvhub.store.lost import lost
    from kvhub.store.roots import remember

    settings = Settings.load()
    left: list[str] = []
    if mappers:
        rows = [find(ref, settings) for ref in mappers]
    else:
        with explained(), reading_registry(settings) as registry:
            every = registry.list()
        rows, left = lockable([row for row in every if is_ready(row)], settings)
        if not rows:
            hint = lost(settings, (row.digest for row in every))
            hint = hint or "; ".join([*left, "kvhub push publishes one; or name mappers"])
            raise BadInput("no mapper is ready, here and on the Hub", hint)
    lock = make_lock([(row, read_manifest(demand_files(row, settings))) for row in rows])
    check_output(path)
    left += [
        f"{row.digest[:12]} is {row.state.value}: {row.state_reason}" for row in rows if not is_ready(row)
    ]
    # First the note: a lock file that gc does not know of would keep nothing.
    remember(path, settings, [entry.digest for entry in lock.mappers])
    write_lock(path, lock)
    for entry in lock.mappers:
        click.echo(
            output.clean(
                f"{entry.digest[:12]}  {entry.source} -> {entry.target}  {entry.place}@{entry.commit[:8]}"
            )
        )
    output.note(f"{path}: {len(lock.mappers)} mapper{'s' if len(lock.mappers) > 1 else ''}")
    for said in left:
        output.note(said)


def is_ready(row: MapperRow) -> bool:
    """Whether it may be served."""
    return row.state.value == "ready"


def lockable(rows: list[MapperRow], settings: Settings) -> tuple[list[MapperRow], list[str]]:
    """Those that others could fetch and whose manifest is here; and what is left out, in words."""
    from kvhub.catalog import files_of

    nowhere = [row for row in rows if not row.locations]
    absent = [row for row in rows if row.locations and not files_of(row, settings).is_dir()]
    out = {row.digest for row in (*nowhere, *absent)}
    said = [
        f"left out, {why}: {', '.join(row.digest[:12] for row in some)}"
        for why, some in (("on no Hub", nowhere), ("files not on this machine", absent))
        if some
    ]
    return [row for row in rows if row.digest not in out], said
