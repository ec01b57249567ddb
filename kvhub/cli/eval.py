"""`kvhub eval`: measure a mapper on held-out text and let the gate decide."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvhub.errors import BadInput

if TYPE_CHECKING:
    from kvhub.evaluation.evidence import Evidence
    from kvhub.model.identity import ModelIdentity
    from kvhub.model.load import LoadedModel


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
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)
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
    style: str,
) -> None:
    """Evaluate MAPPER (a directory, a digest or org/name) on text that no fit has seen.

    Writes evidence.json beside the manifest and the scores into the registry:
    a mapper that passes the gate becomes ready, one that fails stays a draft.
    """
    from kvhub import catalog
    from kvhub.artifact.evidence import write_evidence
    from kvhub.evaluation.report import why
    from kvhub.evaluation.run import EvalSettings, evaluate
    from kvhub.evaluation.text import held_out_windows
    from kvhub.mapper.load import load_mapper, locate

    directory = locate(mapper)
    loaded = load_mapper(directory)
    manifest = loaded.manifest
    here = _load("source", manifest.source, source)
    domains = held_out_windows(texts, here.tokenizer, count=windows, length=prefix + tail)
    there = _load("target", manifest.target, target)
    with _Bar() as bar:
        evidence = evaluate(
            loaded,
            here,
            there,
            domains,
            EvalSettings(tail=tail, exact_prefix=exact_prefix, seed=seed),
            progress=bar.advance,
        )
    _print(evidence, style)
    write_evidence(directory, evidence)
    catalog.record_evidence(manifest, evidence, why=why(evidence))


def _load(role: str, fitted: ModelIdentity, given: str | None) -> LoadedModel:
    """The model named, else the Hub revision in the manifest; refused at once when it is another."""
    import torch

    from kvhub.evaluation.run import check_model
    from kvhub.model.load import load_model

    if given is None:
        kind, _, revision = fitted.revision.partition(":")
        if kind != "commit":
            raise BadInput(
                f"the {role} {fitted.name} was fitted from a directory, which the mapper does not know",
                f"give --{role} DIR",
            )
        given = f"{fitted.name}@{revision}"
    model = load_model(given, dtype=getattr(torch, fitted.dtype))
    check_model(role, fitted, model.identity)
    return model


def _print(evidence: Evidence, style: str) -> None:
    if style == "json":
        click.echo(evidence.to_bytes().decode(), nl=False)
        return
    from rich.console import Console

    from kvhub.evaluation.report import tables

    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file has no edge to wrap at
    for table in tables(evidence):
        console.print(table)
    state = "passed: ready" if evidence.verdict.passed else "not passed: draft"
    console.print(
        f"{evidence.windows} windows, {evidence.protocol}, exact prefix {evidence.exact_prefix}, "
        f"injection error {evidence.injection_max_logit_error:.2g}"
    )
    console.print(f"{evidence.mapper[:12]} {state}")


class _Bar:
    """A progress bar on stderr; silent where stderr is no terminal."""

    def __enter__(self) -> _Bar:
        from rich.console import Console
        from rich.progress import Progress

        self._progress = Progress(console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("evaluating", total=None)
        self._progress.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def advance(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)
