"""`kvhub quantize`: the same mapper with int8 weights."""

from __future__ import annotations

from pathlib import Path

import click

from kvhub.cli import output


@click.command()
@click.argument("mapper")
@click.option(
    "--output", "place", type=click.Path(path_type=Path), help="A new directory; default: KVHUB_HOME."
)
def command(mapper: str, place: Path | None) -> None:
    """Write MAPPER with int8 weights and a scale for every column, as a draft.

    It is another mapper, with its own digest: kvhub eval measures what rounding
    costs, and its gate is judged by that. Ridge family only.
    """
    from kvhub.mapper.quantize import quantize

    directory, manifest = quantize(mapper, place)
    size = sum(entry.size for entry in manifest.files) / 1e6
    click.echo(output.clean(f"{manifest.digest}  int8  {size:.1f} MB  draft  {directory}"))
    output.note("it has no evidence: kvhub eval measures it")
