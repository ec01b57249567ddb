"""`kvhub report`: one page that shows a mapper."""

from __future__ import annotations

from pathlib import Path

import click

from kvhub.cli import output
from kvhub.cli.complete import MAPPER


@click.command()
@click.argument("mapper", type=MAPPER)
@click.option(
    "--output", "path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="The page [default: report-<digest>.html here].",
)  # fmt: skip
@click.option(
    "--pictures", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Also the pictures, as PNG files.",
)  # fmt: skip
def command(mapper: str, path: Path | None, pictures: Path | None) -> None:
    """Write what is known of MAPPER as one HTML page: pair, recipe, evidence, gate, diagnostics.

    Pictures are inside and nothing is loaded from elsewhere, so the file can be sent. `kvhub eval` and
    `kvhub diagnose` make what it shows; without matplotlib it has tables only.
    """
    from kvhub.artifact.read import read_manifest
    from kvhub.catalog import directory_of
    from kvhub.report.write import write_report

    directory = directory_of(mapper)
    wanted = path or Path(f"report-{read_manifest(directory).digest[:12]}.html")
    written = write_report(directory, wanted, pictures)
    if len(written) == 1 and not _drawable():
        output.note('no pictures: pip install "kvhub[report]"')
    for file in written:
        click.echo(output.clean(str(file)))


def _drawable() -> bool:
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None
