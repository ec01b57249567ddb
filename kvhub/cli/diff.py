"""`kvhub diff`: what two mappers do otherwise, and which scores better."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvhub.cli import output
from kvhub.cli.complete import MAPPER
from kvhub.cli.output import Column

if TYPE_CHECKING:
    from kvhub.artifact.manifest import Manifest
    from kvhub.store.compare import Difference
    from kvhub_registry import MapperRow, ScoreRecord

SETTINGS = (Column("name", "SETTING"), Column("a", "A"), Column("b", "B"))
SCORES = (
    Column("domain", "TEXT"),
    Column("metric", "METRIC"),
    Column("a", "A", right=True),
    Column("b", "B", right=True),
    Column("better", "BETTER"),
)


@click.command()
@click.argument("a", type=MAPPER)
@click.argument("b", type=MAPPER)
@click.option("--all", "everything", is_flag=True, help="Show settings and layers that are the same, too.")
@output.format_option("table", "json")
def command(a: str, b: str, everything: bool, form: str) -> None:
    """Compare mapper A with mapper B: settings, selected layers, scores with intervals.

    BETTER names one only where the 95 % intervals do not overlap.
    """
    from kvhub.store.compare import compare

    one, two = _load(a), _load(b)
    found = compare(one, two)
    if form == "json":
        output.as_json(_record(one[0].digest, two[0].digest, found, everything=everything))
        return
    click.echo(f"A  {one[0].digest}  {one[0].state}\nB  {two[0].digest}  {two[0].state}")
    shown = [setting for setting in found.settings if everything or not setting.same]
    if shown:
        click.echo()
        cells = [{"name": s.name, "a": output.clean(s.a), "b": output.clean(s.b)} for s in shown]
        output.table(SETTINGS, cells)
    others = sum(not layer.same for layer in found.layers)
    if others or (everything and found.layers):
        click.echo(f"\n{others} target layers read other source layers{':' if others else ''}")
        for layer in found.layers:
            if not layer.same:
                click.echo(f"  {layer.target_layer}: {_layers(layer.a)} | {_layers(layer.b)}")
            elif everything:
                click.echo(f"  {layer.target_layer}: {_layers(layer.a)} (the same)")
    if found.scores:
        click.echo()
        output.table(
            SCORES,
            [
                {
                    "domain": output.clean(pair.domain),
                    "metric": pair.metric,
                    "a": _score(pair.a),
                    "b": _score(pair.b),
                    "better": pair.better if pair.better in ("A", "B") else "-",
                }
                for pair in found.scores
            ],
        )


def _load(ref: str) -> tuple[MapperRow, Manifest]:
    from kvhub.artifact.read import read_manifest
    from kvhub.catalog import directory_of, find

    row = find(ref)
    return row, read_manifest(directory_of(row.digest))


def _record(a: str, b: str, found: Difference, *, everything: bool) -> dict[str, object]:
    return {
        "a": a,
        "b": b,
        "settings": [{"name": s.name, "a": s.a, "b": s.b, "same": s.same} for s in found.settings],
        "layers": [
            {"target_layer": x.target_layer, "a": x.a, "b": x.b}
            for x in found.layers
            if everything or not x.same
        ],
        "scores": [
            {
                "domain": pair.domain,
                "metric": pair.metric,
                "a": pair.a.model_dump() if pair.a else None,
                "b": pair.b.model_dump() if pair.b else None,
                "better": pair.better,
            }
            for pair in found.scores
        ],
    }


def _layers(chosen: list[int]) -> str:
    return ",".join(map(str, chosen))


def _score(score: ScoreRecord | None) -> str:
    if score is None:
        return "-"
    return f"{score.value:.4f}" + ("" if score.low == score.high else f" [{score.low:.4f}, {score.high:.4f}]")
