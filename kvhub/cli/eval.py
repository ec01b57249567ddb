"""`kvhub eval`: measure a mapper on held-out text and let the gate decide."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvhub.cli import output
from kvhub.errors import BadInput, NotFound

if TYPE_CHECKING:
    from kvhub.model.identity import ModelIdentity


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
    exact_prefix: int | None,
    seed: int,
    device: str,
    form: str,
) -> None:
    """Evaluate MAPPER (a directory, a digest or org/name) on text that no fit has seen.

    Writes evidence.json beside the manifest and the scores into the registry:
    a mapper that passes the gate becomes ready, one that fails stays a draft.
    """
    import torch
    from transformers.utils import logging

    from kvhub import catalog
    from kvhub.artifact.evidence import write_evidence
    from kvhub.cli.evidence_table import print_evidence
    from kvhub.evaluation.gate import reason
    from kvhub.evaluation.run import EvalSettings, evaluate
    from kvhub.evaluation.text import held_out_windows
    from kvhub.mapper.load import load_mapper, locate
    from kvhub.model.load import load_model
    from kvhub.model.tokenizer import load_tokenizer

    logging.disable_progress_bar()
    directory = locate(mapper)
    loaded = load_mapper(directory)
    manifest = loaded.manifest
    # Whatever can be refused is refused before gigabytes of weights are read.
    paths = [locate_model("source", manifest.source, source), locate_model("target", manifest.target, target)]
    domains = held_out_windows(texts, load_tokenizer(paths[0]), count=windows, length=prefix + tail)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    here = load_model(paths[0], getattr(torch, manifest.source.dtype), device=device)
    there = load_model(paths[1], getattr(torch, manifest.target.dtype), device=device)
    with _Progress() as progress:
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


def locate_model(role: str, fitted: ModelIdentity, given: str | None) -> Path:
    """Where the model is: as given, else the Hub revision in the manifest; refused when it is another."""
    from kvhub.evaluation.run import check_model
    from kvhub.model.identify import identify
    from kvhub.model.resolve import resolve

    if given is None:
        kind, _, revision = fitted.revision.partition(":")
        if kind != "commit":
            raise BadInput(
                f"the {role} {fitted.name} was fitted from a directory, which the mapper does not know",
                f"give --{role} DIR",
            )
        given = f"{fitted.name}@{revision}"
    path = resolve(given)
    check_model(role, fitted, identify(path, dtype=fitted.dtype))
    return path


class _Progress:
    """On stderr: a bar with the time left on a terminal, else a line every half minute."""

    def __enter__(self) -> _Progress:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._told = time.monotonic()
        self._bar = Progress(console=console, transient=True) if console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task("evaluating", total=None)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() - self._told >= 30:
            self._told = time.monotonic()
            output.note(f"evaluating: {done}/{total} windows")
