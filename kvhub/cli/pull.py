"""`kvhub pull`: fetch a mapper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvhub.cli import output
from kvhub.errors import BadInput, Corrupt

if TYPE_CHECKING:
    from kvhub_registry import MapperRow


@click.command()
@click.argument("repository", metavar="ORG/NAME[/FOLDER][@REVISION]", required=False)
@click.option("--locked", is_flag=True, help="Fetch what kvhub.lock names, and nothing else.")
@click.option(
    "--lock",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("kvhub.lock"),
    show_default=True,
    help="The lock file of --locked.",
)
def command(repository: str | None, locked: bool, path: Path) -> None:
    """Fetch a mapper from the Hub, check every byte, and register it.

    FOLDER is one of a repository with several mappers, or the digest of the
    mapper (six digits are enough).

    REVISION is a branch, a tag or a commit. The mapper is ready only where the
    evidence that comes with it passes the gate here; else it is a draft. Shards
    that are here already are not fetched again.

    With --locked every mapper of kvhub.lock: the very commit and digest, and
    without the Hub where all bytes are here.
    """
    if locked == (repository is not None):
        raise BadInput("name a repository, or give --locked", "kvhub pull ORG/NAME")
    try:
        _pull(repository, path)
    except Corrupt as error:
        error.hint = error.hint or "pull again; where it stays so, the repository itself is damaged"
        raise


def _pull(repository: str | None, path: Path) -> None:
    if repository is None:
        from kvhub.hub.locked import pull_locked

        with output.progress("pulling") as progress:
            rows = pull_locked(path, progress=progress)
        for row in rows:
            _show(row)
        return
    from kvhub.hub.pull import fetch

    with output.progress(f"pulling {repository}") as progress:
        row = fetch(repository, progress=progress)
    _show(row)
    output.note(f"{row.state}: {row.state_reason}")


def _show(row: MapperRow) -> None:
    click.echo(output.clean(f"{row.digest}  {row.source.name} -> {row.target.name}  {row.state}  {row.path}"))
