"""`kvhub export`: write a mapper in another layout."""

from __future__ import annotations

from pathlib import Path

import click

from kvhub.cli import output
from kvhub.cli.complete import MAPPER


@click.command()
@click.argument("mapper", type=MAPPER)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--layout",
    type=click.Choice(["semantic-router", "kvtransfer", "veloxquant"]),
    required=True,
    help="Of vLLM semantic-router's kv_mapper, of kvtransfer, or of VeloxQuant-MLX.",
)
@click.option(
    "--drop-exact-prefix",
    is_flag=True,
    help="Export a mapper whose first positions must be the target's own, which no other layout can say.",
)
def command(mapper: str, directory: Path, layout: str, drop_exact_prefix: bool) -> None:
    """Write MAPPER into DIRECTORY in a layout that other software reads.

    Weights in float32; a head-local mapper becomes a full one with zeros. Its
    evidence stays here: these layouts have no place for it.
    """
    from kvhub.catalog import directory_of
    from kvhub.interop.convert import export_mapper

    manifest = export_mapper(directory_of(mapper), directory, layout, drop_exact_prefix=drop_exact_prefix)
    click.echo(output.clean(f"{manifest.digest}  {layout}  {directory}"))
