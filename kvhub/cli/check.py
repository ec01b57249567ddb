"""`kvhub check`: whether a pair can work, and what it costs, before anything is run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvhub.cli import output
from kvhub.errors import Incompatible

if TYPE_CHECKING:
    from kvhub.check import Check, Side


@click.command()
@click.argument("source")
@click.argument("target")
@click.option(
    "--k", type=int, show_default="8, or all layers where fewer", help="Source layers for each target layer."
)
@output.format_option("table", "json")
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
def command(source: str, target: str, k: int | None, form: str, as_json: bool) -> None:
    """Say whether a cache of SOURCE can be mapped to TARGET, and what that takes.

    Reads configs, weight headers and tokenizers; no model is run and no weights are downloaded.
    The exit code is 7 where the pair cannot work.
    """
    from kvhub.check import check

    found = check(source, target, k=k)
    if as_json or form == "json":
        output.as_json(found.record())
    else:
        _print(found)
    if not found.possible:
        raise click.exceptions.Exit(Incompatible.exit_code)


def _print(found: Check) -> None:
    for where, side in (("source", found.source), ("target", found.target)):
        if side is not None:
            click.echo(f"{where:<12} {output.clean(_model(side))}")
    for refused in found.refusals:
        click.echo(f"refused      {output.clean(f'{refused.where}: {refused.message} [{refused.code}]')}")
        if refused.hint:
            click.echo(f"             {output.clean(refused.hint)}")
    for note in found.notes:
        click.echo(f"note         {output.clean(note)}")
    source, target = found.source, found.target
    if found.possible and source is not None and target is not None:
        _print_costs(found, source, target)
    click.echo(f"verdict      {'possible' if found.possible else 'impossible'}")


def _model(side: Side) -> str:
    shape = side.geometry
    return (
        f"{side.name} {side.revision[:20]}, {side.architecture}, {shape.num_layers} layers x"
        f" {shape.num_kv_heads} KV heads x {shape.head_dim}, {side.rope.rope_type} RoPE"
        f" to {side.rope.context}, {output.size(shape.bytes_per_token(2))} of KV a token in 16 bits"
    )


def _print_costs(found: Check, source: Side, target: Side) -> None:
    heads = source.geometry.num_kv_heads, target.geometry.num_kv_heads
    matched = f"matched ({heads[0]})" if found.matched_heads else f"unmatched ({heads[0]} and {heads[1]})"
    click.echo(f"KV heads     {matched}")
    for cost in found.costs:
        share = f", {cost.map_flops / target.layer_flops:.1%} of a prefill" if target.layer_flops else ""
        click.echo(
            f"{cost.support:<12} k = {found.k}: {output.size(cost.artifact_bytes)} on disk,"
            f" {output.count(cost.map_flops)} FLOP a token{share}; a fit needs {cost.rows_needed} rows,"
            f" better {cost.rows_advised}"
        )
    models = source.weights_bytes + target.weights_bytes
    click.echo(
        f"fit memory   {output.size(found.fit_bytes)} of moments and solves,"
        f" beside {output.size(models)} of models"
    )
