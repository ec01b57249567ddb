"""`kvhub eval`: measure a mapper on held-out text and let the gate decide."""

from __future__ import annotations

from pathlib import Path

import click

from kvhub.cli import output
from kvhub.errors import NotFound


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
    "--tail", type=click.IntRange(min=2), default=64, show_default=True, help="Tokens the target runs."
)
@click.option(
    "--exact-prefix", type=click.IntRange(min=0), help="First tokens native [default: the mapper's]."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the bootstrap.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda", "sharded"]), default="auto", show_default=True,
    help="sharded: over all GPUs, memory and disk (accelerate), as is a model too large for its GPU.",
)  # fmt: skip
@output.format_option("table", "json")
def command(
    mapper: str,
    texts: tuple[Path, ...],
    source: str | None,
    target: str | None,
    windows: int,
    prefix: int,
    tail: int,
    exact_prefix: int | None,
    seed: int,
    device: str,
    form: str,
) -> None:
    """Evaluate MAPPER (a directory, a digest or org/name) on text that no fit has seen.

    Writes evidence.json beside the manifest and the scores into the registry:
    a mapper that passes the gate becomes ready, one that fails stays a draft.
    """
    from transformers.utils import logging

    from kvhub import catalog
    from kvhub.artifact.evidence import write_evidence
    from kvhub.cli.evidence_table import print_evidence
    from kvhub.cli.models import Progress, load_models, locate_models
    from kvhub.evaluation.gate import reason
    from kvhub.evaluation.run import EvalSettings, evaluate
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
        evidence = evaluate(
            loaded,
            here,
            there,
            domains,
            EvalSettings(tail=tail, exact_prefix=exact_prefix, seed=seed),
            progress=progress,
        )
    if form == "json":
        click.echo(evidence.to_bytes().decode(), nl=False)
    else:
        print_evidence(evidence)
    write_evidence(directory, evidence)
    try:
        catalog.record_evidence(manifest, evidence, why=reason(evidence.verdict))
    except NotFound:  # fitted elsewhere, or removed from the registry: evaluating it puts it there
        catalog.register(directory, manifest)
        catalog.record_evidence(manifest, evidence, why=reason(evidence.verdict))
