"""`kvhub import`: take over a mapper of another layout."""

from __future__ import annotations

from pathlib import Path

import click

from kvhub.cli import output


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--source", required=True, metavar="MODEL", help="The source model, a directory or Hub id.")
@click.option("--target", required=True, metavar="MODEL", help="The target model.")
@click.option("--dtype", default="bfloat16", show_default=True, help="What both models compute in.")
@click.option(
    "--layout",
    type=click.Choice(["semantic-router", "kvtransfer", "veloxquant"]),
    help="Default: by its files.",
)
def command(directory: Path, source: str, target: str, dtype: str, layout: str | None) -> None:
    """Import the mapper in DIRECTORY as a draft.

    Reads vLLM semantic-router's kv_mapper, kvtransfer and VeloxQuant-MLX. None
    of them says enough to know its two models, so name them; whatever it claims
    of its quality is not taken over: kvhub eval measures it.
    """
    from kvhub.interop.convert import import_mapper
    from kvhub.model.identify import identify
    from kvhub.model.resolve import resolve

    one, two = (identify(resolve(ref), dtype=dtype) for ref in (source, target))
    place, manifest = import_mapper(directory, one, two, layout=layout)
    click.echo(output.clean(f"{manifest.digest}  {one.name} -> {two.name}  draft  {place}"))
    output.note("it has no evidence: kvhub eval measures it")
