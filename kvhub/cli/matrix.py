"""`kvhub matrix`: which pairs of a family have a mapper, and how each stands."""

from __future__ import annotations

from pathlib import Path

import click

from kvhub.cli import output
from kvhub.cli.listed import say_lost
from kvhub.cli.output import Column
from kvhub.errors import BadInput
from kvhub.store.coverage import STANDINGS, Cell, Coverage, coverage, today, unknown


@click.command()
@click.option("--family", metavar="NAME", help="Only models whose name begins so (qwen3).")
@click.option(
    "--model", "models", multiple=True, metavar="MODEL", help="Include this model, too; repeatable."
)
@click.option(
    "--served",
    multiple=True,
    metavar="MODEL=REVISION",
    help="The revision that is served now; mappers of another are stale. Repeatable.",
)
@click.option(
    "--output",
    "-o",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of --format png.",
)
@output.format_option("table", "list", "json", "png")
def command(
    family: str | None, models: tuple[str, ...], served: tuple[str, ...], path: Path | None, form: str
) -> None:
    """Show the directed table of a family: rows are sources, columns are targets.

    A cell says how the pair's mapper stands (ready, draft, failing, stale,
    retired, or "-" for none), its top-1 agreement, size and age. "list" prints a
    line a pair, with the reason.
    """
    from kvhub.catalog import explained, reading_registry

    revisions = {}
    for text in served:
        name, separator, revision = text.partition("=")
        if not separator or not name.strip() or not revision.strip():
            raise BadInput(f"{text!r} is not MODEL=REVISION", "--served qwen3-8b=COMMIT")
        revisions[name] = revision
    if not all(name.strip() for name in models):
        raise BadInput("--model needs the name of a model", "--model qwen3-8b")
    if (form == "png") != (path is not None):
        raise BadInput(
            "a picture needs both --format png and --output FILE", "kvhub matrix --format png --output a.png"
        )
    with explained(), reading_registry() as registry:
        rows = registry.list()
    table = coverage(rows, family=family, models=models, served=revisions)
    missed = not rows and say_lost(())
    for name in unknown(rows, models, revisions):
        output.note(f"--served {name}: no mapper here is from or to a model of that name")
    if form == "json":
        output.as_json(record(table))
    elif not table.models:
        if not missed:
            output.note("no models match" if family else "no mappers yet, so no models")
    elif path is not None:
        from kvhub.cli.picture import matrix_picture

        matrix_picture(table, path)
        click.echo(str(path))
    elif form == "list":
        _list(table)
    else:
        _table(table)
        _summary(table)


def record(table: Coverage) -> dict[str, object]:
    """The table for programs."""
    now = today()
    return {
        "models": table.models,
        "pairs": [
            {
                "source": cell.source,
                "target": cell.target,
                "standing": cell.standing,
                "why": cell.why,
                "digest": cell.row.digest if cell.row else None,
                "top1": cell.row.score("top1") if cell.row else None,
                "attention_cosine": cell.row.score("attention_cosine") if cell.row else None,
                "gap_recovered": cell.row.score("gap_recovered") if cell.row else None,
                "size": cell.row.size if cell.row else None,
                "created": output.instant(cell.row.created) if cell.row else None,
                "age_days": None if (age := cell.age_days(now)) is None else round(age, 2),
            }
            for cell in table.cells
        ],
        "counts": {name: table.count(name) for name in STANDINGS},
    }


def text(cell: Cell) -> str:
    """One cell in one line."""
    if cell.row is None:
        return "-"
    age = cell.age_days(today())
    quality = cell.row.score("top1")
    parts = [cell.standing, *([f"{quality:.2f}"] if quality is not None else []), output.size(cell.row.size)]
    return " ".join([*parts, f"{age:.0f}d"])


def _table(table: Coverage) -> None:
    columns = [Column("source", "SOURCE \\ TARGET")]
    short = dict(zip(table.models, map(output.clean, table.headings()), strict=True))
    columns += [Column(name, short[name]) for name in table.models]
    output.table(
        columns,
        [
            {"source": short[source]}
            | {t: "" if t == source else text(table.cell(source, t)) for t in table.models}
            for source in table.models
        ],
    )


def _list(table: Coverage) -> None:
    columns = [Column("source", "SOURCE"), Column("target", "TARGET"), Column("cell", "MAPPER")]
    rows = [
        {"source": cell.source, "target": cell.target, "cell": text(cell), "why": cell.why}
        for cell in table.cells
    ]
    cleaned = [{key: output.clean(value) for key, value in row.items()} for row in rows]
    output.table([*columns, Column("why", "WHY")], cleaned)


def _summary(table: Coverage) -> None:
    counts = [(table.count(name), name) for name in STANDINGS]
    output.note(
        ", ".join(f"{count} {name}" for count, name in counts if count) + f" of {len(table.cells)} pairs"
    )
