"""`kvhub plan`: what mappers between a set of models would need."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from kvhub.cli import output
from kvhub.cli.listed import say_lost
from kvhub.cli.output import Column

if TYPE_CHECKING:
    from kvhub.store.planning import Need, Shape

COLUMNS = (
    Column("source", "SOURCE"),
    Column("target", "TARGET"),
    Column("k", "K", right=True),
    Column("parameters", "PARAMETERS", right=True, keep=1),
    Column("size", "SIZE", right=True),
    Column("moments", "FIT MEMORY", right=True),
    Column("operations", "FIT TFLOP", right=True, keep=2),
    Column("existing", "HERE"),
)


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL MODEL...")
@click.option(
    "--k", type=click.IntRange(min=1), default=8, show_default=True, help="Source layers per target layer."
)
@click.option("--support", type=click.Choice(["full", "head-local"]), default="full", show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@output.format_option("table", "json")
def command(models: tuple[str, ...], k: int, support: str, dtype: str, form: str) -> None:
    """Say what all ordered pairs of MODELs need: disk, and memory and work of each fit.

    MODEL is a directory, a name that the registry knows, or org/name on the Hub
    (of which only config.json is fetched). FIT MEMORY holds the moments of all
    source layers at once; FIT TFLOP is the work of the Gram matrices alone, for
    the paper's 128,000 rows; both models' prefill of the text comes on top.
    """
    from kvhub.catalog import explained, reading_registry
    from kvhub.store.planning import plan, shape_of

    with explained(), reading_registry() as registry:
        rows = registry.list()
    say_lost(row.digest for row in rows)
    named: dict[Shape, tuple[str, Shape]] = {}
    for ref in models:
        shape = shape_of(ref, rows)
        first, _ = named.setdefault(replace(shape, name=shape.name.casefold()), (ref, shape))
        if first != ref:
            output.note(f"{ref} and {first} are one model, {shape.name}")
    shapes = [shape for _, shape in named.values()]
    needs = plan(shapes, rows, k=k, support=support, itemsize=2 if dtype == "bfloat16" else 4)
    missing = [need for need in needs if need.existing is None]
    if form == "json":
        output.as_json(
            {
                "pairs": [_record(need) for need in needs],
                "size": sum(need.size for need in needs),
                "missing": len(missing),
                "missing_size": sum(need.size for need in missing),
            }
        )
        return
    output.table(COLUMNS, [_cells(need) for need in needs])
    output.note(
        f"{len(needs)} pairs, {output.size(sum(need.size for need in needs))}; "
        f"{len(missing)} missing, {output.size(sum(need.size for need in missing))}"
    )


def _record(need: Need) -> dict[str, object]:
    return {
        "source": need.source.name,
        "target": need.target.name,
        "k": need.k,
        "parameters": need.parameters,
        "size": need.size,
        "moments": need.moments,
        "operations": need.operations,
        "digest": need.existing.digest if need.existing else None,
        "state": need.existing.state.value if need.existing else None,
        "note": need.note,
    }


def _cells(need: Need) -> dict[str, str]:
    here = f"{need.existing.digest[:12]} {need.existing.state}" if need.existing else "-"
    return {
        "source": output.clean(need.source.name),
        "target": output.clean(need.target.name),
        "k": str(need.k),
        "parameters": output.count(need.parameters),
        "size": output.size(need.size),
        "moments": output.size(need.moments),
        "operations": f"{need.operations / 1e12:.3g}",
        "existing": here + (f" ({need.note})" if need.note else ""),
    }
