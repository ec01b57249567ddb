"""`kvhub sign`: vouch for a mapper."""

from __future__ import annotations

from pathlib import Path

import click

from kvhub.cli import output
from kvhub.cli.complete import MAPPER
from kvhub.errors import BadInput


@click.command()
@click.argument("mapper", required=False, type=MAPPER)
@click.option(
    "--key",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Private ed25519 key (PEM) to sign with.",
)
@click.option(
    "--new-key",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Make a key in this file (mode 0600) and print its public part.",
)
def command(mapper: str | None, key: Path | None, new_key: Path | None) -> None:
    """Sign MAPPER's manifest, and with it the sha256 of every file.

    The signature lies beside the manifest and travels with push and pull. Give
    others the public key: kvhub trust NAME KEY lets them check it. Needs
    pip install "kvhub[sign]".
    """
    from kvhub.artifact.read import verify_artifact
    from kvhub.catalog import directory_of
    from kvhub.store import signature

    if mapper is None and new_key is None:
        raise BadInput("nothing to do", "kvhub sign --new-key FILE, or kvhub sign MAPPER --key FILE")
    if new_key is not None:
        click.echo(f"public key {signature.new_key(new_key)}")
        output.note(f"{new_key} is the private one: keep it")
    if mapper is None:
        return
    chosen = key or new_key
    if chosen is None:
        raise BadInput("with which key?", "--key FILE, or --new-key FILE for a new one")
    directory = directory_of(mapper)
    made = signature.sign(directory, verify_artifact(directory, deep=True), chosen)
    click.echo(f"{made.mapper}  signed by {made.public_key}")
