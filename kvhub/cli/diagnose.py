"""`kvhub diagnose`: where a mapper errs, and whether attention looks there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvhub.cli import output
from kvhub.cli.output import Column

if TYPE_CHECKING:
    from kvhub.artifact.manifest import Manifest
    from kvhub.diagnostics.record import Diagnostics

METRICS = (
    ("attention_cosine", "attention-output cosine"),
    ("attention_cosine_worst", "  worst layer"),
    ("k_error_concentration", "K error concentration"),
    ("v_error_concentration", "V error concentration"),
    ("attention_kl", "attention KL, nat"),
    ("output_error", "attention-output error"),
    ("residual_error", "push on the residual"),
    ("residual_error_worst", "  worst layer"),
    ("key_error", "key error"),
    ("key_error_first", "  positions 0-3"),
    ("value_error", "value error"),
    ("value_error_first", "  positions 0-3"),
)


@click.command()
@click.argument("mapper")
@click.option(
    "--text", "texts", type=click.Path(path_type=Path), multiple=True, required=True, metavar="FILE",
    help="Held-out text; each file is a domain. Repeat for more.",
)  # fmt: skip
@click.option("--source", metavar="MODEL", help="The source model, if not the Hub model it was fitted on.")
@click.option("--target", metavar="MODEL", help="The target model, likewise.")
@click.option("--windows", type=click.IntRange(min=2), default=40, show_default=True, help="Over all texts.")
@click.option("--prefix", type=click.IntRange(min=1), default=192, show_default=True, help="Mapped tokens.")
@click.option(
    "--tail",
    type=click.IntRange(min=2),
    default=64,
    show_default=True,
    help="Tokens whose queries look back.",
)
@click.option("--maps/--no-maps", default=True, show_default=True, help="Also R2 of every pair of layers.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the bootstrap.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@output.format_option("table", "json")
def command(
    mapper: str,
    texts: tuple[Path, ...],
    source: str | None,
    target: str | None,
    windows: int,
    prefix: int,
    tail: int,
    maps: bool,
    seed: int,
    device: str,
    form: str,
) -> None:
    """Measure where MAPPER errs: by layer, head, position and text, and whether attention looks there.

    Writes assets/diagnostics.json beside the manifest; `kvhub report` draws it. Where the evidence is of
    the same windows (the same --text, --windows, --prefix and --tail as `kvhub eval`), the scores join it
    and the registry. No diagnostic decides whether a mapper serves.
    """
    from transformers.utils import logging

    from kvhub.cli.models import Progress, load_models, locate_models
    from kvhub.diagnostics.record import write_diagnostics
    from kvhub.diagnostics.run import diagnose
    from kvhub.evaluation.text import held_out_windows
    from kvhub.mapper.load import load_mapper, locate
    from kvhub.model.tokenizer import load_tokenizer

    logging.disable_progress_bar()
    directory = locate(mapper)
    loaded = load_mapper(directory)
    manifest = loaded.manifest
    paths = locate_models(manifest, source, target)
    domains = held_out_windows(texts, load_tokenizer(paths[0]), count=windows, length=prefix + tail)
    here, there = load_models(manifest, paths, device)
    with Progress() as progress:
        found = diagnose(loaded, here, there, domains, tail=tail, maps=maps, seed=seed, progress=progress)
    written = write_diagnostics(directory, found)
    if form == "json":
        click.echo(found.to_bytes().decode(), nl=False)
    else:
        _print(found)
        click.echo()
        click.echo(output.clean(f"written to {written}; kvhub report draws it"))
    if not _join(directory, manifest, found):
        output.note("the evidence is of other windows, or there is none: the scores stay in diagnostics.json")


def _join(directory: Path, manifest: Manifest, found: Diagnostics) -> bool:
    """Put the scores into the evidence and the registry, where both are of the same windows."""
    from kvhub import catalog
    from kvhub.artifact.evidence import read_evidence, write_evidence
    from kvhub.errors import NotFound
    from kvhub.evaluation.gate import reason

    evidence = read_evidence(directory, manifest)
    if evidence is None or (evidence.text, evidence.exact_prefix) != (found.text, found.exact_prefix):
        return False
    if not evidence.protocol.startswith(f"prefix {found.prefix}, tail {found.tail} "):
        return False
    ours = {(score.metric, score.arm, score.domain): score for score in found.scores}
    theirs = {(score.metric, score.arm, score.domain): score for score in evidence.scores}
    measured = {metric for metric, _, _ in theirs if metric.startswith("attention_cosine")}
    kept = {key: score for key, score in ours.items() if key[0] not in measured}
    joined = evidence.model_copy(update={"scores": list((theirs | kept).values())})
    write_evidence(directory, joined)
    try:
        catalog.record_evidence(manifest, joined, why=reason(joined.verdict))
    except NotFound:  # fitted elsewhere, and not registered here
        output.note("the mapper is not registered here; its evidence holds the scores")
    return True


def _print(found: Diagnostics) -> None:
    from kvhub.cli.evidence_table import interval
    from kvhub.diagnostics.buckets import by_bucket
    from kvhub.evaluation.evidence import ALL

    names = [*(profile.domain for profile in found.positions), ALL]
    heads = [Column(name, output.clean(name.upper()), right=True, keep=1) for name in names]
    output.table(
        [Column("metric", "MAPPED"), *heads],
        [
            {"metric": title} | {n: interval(found.score(metric, n)) for n in names}
            for metric, title in METRICS
        ],
    )
    click.echo()
    groups = [name for name, _ in by_bucket(found.positions[0].key)]
    output.table(
        [Column("rows", "ERROR BY POSITION"), *(Column(g, g, right=True, keep=1) for g in groups)],
        [
            {"rows": f"{output.clean(profile.domain)} {side}"}
            | {name: f"{value:.3f}" for name, value in by_bucket(getattr(profile, side))}
            for profile in found.positions
            for side in ("key", "value")
        ],
    )
    if found.by_k:
        click.echo()
        output.table(
            [Column("k", "K", right=True), Column("key", "R2 KEYS", right=True),
             Column("value", "R2 VALUES", right=True)],
            [
                {"k": str(p.k), "key": f"{p.r2_key:.3f}", "value": f"{p.r2_value:.3f}"}
                for p in found.by_k
            ],
        )  # fmt: skip
