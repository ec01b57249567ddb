"""`kvhub info`: everything known of one mapper."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kvhub.catalog import files_of, look_up
from kvhub.cli import output
from kvhub.cli.complete import MAPPER
from kvhub.cli.listed import of_row, record
from kvhub.cli.output import Column
from kvhub.errors import KvhubError
from kvhub_registry import EventRecord, MapperRow, ModelRecord, ScoreRecord
from kvhub_registry.listing import FIT_DOMAIN

if TYPE_CHECKING:
    from kvhub.artifact.manifest import Manifest
    from kvhub.evaluation.evidence import Evidence

SCORES = (
    Column("domain", "TEXT"),
    Column("metric", "METRIC"),
    Column("arm", "ARM"),
    Column("value", "VALUE", right=True),
    Column("interval", "95 % INTERVAL", right=True, keep=2),
    Column("n", "N", right=True, keep=1),
)


@click.command()
@click.argument("mapper", type=MAPPER)
@output.format_option("table", "json")
def command(mapper: str, form: str) -> None:
    """Show one mapper: pair, method, calibration, scores with intervals, gate, places.

    MAPPER is a digest (six digits are enough), an alias, or 'source->target'.
    """
    row, events = look_up(mapper)
    manifest, evidence, problem = _files(row)
    if form == "json":
        output.as_json(
            record(of_row(row))
            | {
                "scores": [score.model_dump() for score in row.scores],
                "manifest": manifest.model_dump(mode="json") if manifest else None,
                "verdict": evidence.verdict.model_dump(mode="json") if evidence else None,
                "problem": problem,
                "history": [event.model_dump(mode="json") for event in events],
            }
        )
        return
    _head(row, manifest, events)
    if problem:
        click.echo(f"problem      {output.clean(problem)}")
    if evidence is not None:
        from kvhub.cli.evidence_table import print_evidence

        click.echo()
        print_evidence(evidence)
    elif row.scores:
        click.echo()
        output.table(SCORES, [_score(score) for score in row.scores])


def _files(row: MapperRow) -> tuple[Manifest | None, Evidence | None, str | None]:
    """What the artifact itself says; a damaged one is shown, not fatal."""
    from kvhub.artifact.evidence import read_evidence
    from kvhub.artifact.read import read_manifest

    try:
        directory = files_of(row)
        manifest = read_manifest(directory)
        return manifest, read_evidence(directory, manifest), None
    except KvhubError as error:
        return None, None, error.message


def _head(row: MapperRow, manifest: Manifest | None, events: list[EventRecord]) -> None:
    convention = (
        "of the mean diagonal" if row.regularization_convention == "relative-mean-diagonal" else "absolute"
    )
    lines = [
        ("digest", row.digest),
        ("source", _model(row.source)),
        ("target", _model(row.target)),
        ("state", f"{row.state.value} since {output.instant(row.changed)}: {row.state_reason}"),
        (
            "method",
            f"{row.family}, {row.support}, k = {row.k}, lambda = {row.regularization:g} ({convention})",
        ),
        ("exact prefix", f"{row.exact_prefix} positions, held by the target itself"),
        ("calibration", _calibration(row)),
        ("created", output.instant(row.created)),
        ("files", f"{files_of(row)} ({output.size(row.size)})"),
    ]
    if manifest is not None:
        lines.insert(5, ("layers", _layers(manifest)))
    if row.aliases:
        lines.append(("aliases", ", ".join(row.aliases)))
    for place in row.locations:
        lines.append(("pushed to" if place.pushed else "pulled from", f"{place.repo_id}@{place.commit}"))
    lines += [
        ("history", f"{output.instant(event.at)}  {event.what}" + (f": {event.why}" if event.why else ""))
        for event in events
    ]
    for name, text in lines:
        click.echo(f"{name:<12} {output.clean(text)}")


def _model(model: ModelRecord) -> str:
    shape = f"{model.num_layers} layers, {model.num_kv_heads} KV heads of {model.head_dim}, {model.dtype}"
    return f"{model.name}  {model.revision}  {model.architecture}, {shape}"


def _calibration(row: MapperRow) -> str:
    given = row.calibration
    revision = f"@{given.revision}" if given.revision else ""
    counts = f"{output.count(given.tokens)} tokens, {output.count(given.rows)} rows"
    return f"{given.dataset}{revision}, {counts}, sha256 {given.digest[:12]}"


def _layers(manifest: Manifest) -> str:
    text = "; ".join(f"{t}<-{','.join(map(str, chosen))}" for t, chosen in enumerate(manifest.source_layers))
    return text if len(text) <= 400 else text[:400].rpartition(";")[0] + "; ... (--format json has all)"


def _score(score: ScoreRecord) -> dict[str, str]:
    interval = "-" if score.domain == FIT_DOMAIN else f"{score.low:.4f} .. {score.high:.4f}"
    return {
        "domain": output.clean(score.domain),
        "metric": score.metric,
        "arm": score.arm,
        "value": f"{score.value:.4f}",
        "interval": interval,
        "n": str(score.n),
    }
