"""`kvhub fit`: fit mappers for a pair of models."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from kvhub.errors import BadInput

if TYPE_CHECKING:
    from kvhub.fit.command import Stored

_EVERY = 30.0
"""Seconds between log lines where stderr is no terminal."""
_FEW = 4
"""Rows for each feature below which a fit extrapolates: at 1.25, in-sample R2 .96 was .10 held out."""


@click.command()
@click.argument("source")
@click.argument("target")
@click.option(
    "--text", "texts", multiple=True, metavar="FILE[:WEIGHT]",
    help="Calibration text (UTF-8, JSON lines, Parquet); repeat for more domains, sampled by weight.",
)  # fmt: skip
@click.option(
    "--dataset", "datasets", multiple=True, metavar="ORG/NAME[/DIR][@REV][:WEIGHT]",
    help="Calibration text from a data set on the Hub, read only as far as it is needed.",
)  # fmt: skip
@click.option(
    "--k", default=None, metavar="N|all|auto", show_default="8, or all layers where fewer",
    help="Source layers for each target layer; auto chooses on held-out attention output and KL.",
)  # fmt: skip
@click.option(
    "--lambda", "regularization", default="1e-3", show_default=True, metavar="R|paper|auto",
    help="Ridge strength relative to the Gram's mean diagonal, or the paper's 0.01 a token.",
)  # fmt: skip
@click.option(
    "--recipe", type=click.Choice(["default", "ridge", "paper", "best"]), default="default",
    show_default=True,
    help="What measured best; a plain ridge; the paper's; or a search over closed forms on text set aside.",
)  # fmt: skip
@click.option(
    "--tries", type=click.IntRange(min=1), default=24, show_default=True,
    help="Candidates that the best recipe measures, at most: its budget of time.",
)  # fmt: skip
@click.option(
    "--normalise-keys", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True,
    help="Mapped keys through the target's own k_norm; auto: in the default recipe where it has one, in best"
    " where that is better, else not.",
)  # fmt: skip
@click.option("--sequences", type=int, default=500, show_default=True, help="Windows of text, at most.")
@click.option(
    "--length", default="1024", show_default=True, metavar="N[,N...]",
    help="Tokens in a window; several lengths take turns.",
)  # fmt: skip
@click.option("--stride", type=int, default=4, show_default=True, help="Every n-th token is a row.")
@click.option(
    "--support", type=click.Choice(["full", "head-local"]), default="full", show_default=True,
    help="A target head reads all source heads, or the same one.",
)  # fmt: skip
@click.option(
    "--distill", type=click.IntRange(min=0), metavar="STEPS", show_default="60 in default and best, else 0",
    help="Then so many gradient steps on KL through the target, folded into the matrices.",
)  # fmt: skip
@click.option(
    "--family", type=click.Choice(["ridge", "mlp"]), default="ridge", show_default=True,
    help="A matrix a layer, or networks of two hidden layers.",
)  # fmt: skip
@click.option(
    "--hidden", default="1024,1024", show_default=True, metavar="N,N", help="Widths of an mlp's layers."
)  # fmt: skip
@click.option(
    "--networks", type=click.Choice(["head", "layer"]), default="head", show_default=True,
    help="One network a target head, or one a layer (mlp).",
)  # fmt: skip
@click.option("--epochs", type=int, default=20, show_default=True, help="Passes over the rows (mlp).")
@click.option(
    "--batch", type=click.IntRange(min=1), default=4096, show_default=True, help="Rows of a step (mlp)."
)
@click.option(
    "--exact-prefix", type=int, default=0, show_default=True,
    help="First positions to leave out; the target must then compute them itself.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["auto", "bfloat16", "float32"]), default="auto", show_default=True,
    help="Of both models' forwards, and of the servers the mapper is for.",
)  # fmt: skip
@click.option(
    "--store-dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True,
    help="Of the mapper's weights.",
)  # fmt: skip
@click.option("--both", is_flag=True, help="Also fit TARGET -> SOURCE, from the same captures.")
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="DIR",
    help="Put each mapper into a directory here instead of KVHUB_HOME.",
)  # fmt: skip
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), metavar="DIR",
    help="Keep progress here instead of KVHUB_HOME; the same command goes on from it.",
)  # fmt: skip
@click.option(
    "--checkpoint-every", type=click.IntRange(min=1), metavar="N",
    help="Windows between checkpoints, instead of by time.",
)  # fmt: skip
@click.option(
    "--captures", type=click.Path(path_type=Path), metavar="DIR",
    help="Keep both models' caches of the text here, and use those that are there.",
)  # fmt: skip
@click.option(
    "--low-memory", is_flag=True,
    help="One model at a time, its caches of the text on disk.",
)  # fmt: skip
@click.option(
    "--max-memory", type=click.FloatRange(min=0, max=1e6, min_open=True), metavar="GB",
    help="Use no more than this, instead of what is free.",
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda", "sharded"]), default="auto", show_default=True,
    help="sharded: over all GPUs, memory and disk (accelerate), as is a model too large for its GPU.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order of documents.")
def command(
    source: str,
    target: str,
    texts: tuple[str, ...],
    datasets: tuple[str, ...],
    k: str | None,
    regularization: str,
    recipe: Any,
    tries: int,
    normalise_keys: Any,
    sequences: int,
    length: str,
    stride: int,
    support: Any,
    distill: int | None,
    family: str,
    hidden: str,
    networks: Any,
    epochs: int,
    batch: int,
    exact_prefix: int,
    dtype: str,
    store_dtype: Any,
    both: bool,
    output: Path | None,
    checkpoint: Path | None,
    checkpoint_every: int | None,
    captures: Path | None,
    low_memory: bool,
    max_memory: float | None,
    device: str,
    seed: int,
) -> None:
    """Fit a mapper from SOURCE's cache to TARGET's.

    SOURCE and TARGET are directories or Hub ids (org/name[@revision]) of models
    with one vocabulary. The mapper is registered as a draft, until `kvhub eval`
    has measured it. A fit that was interrupted goes on where it was when the
    same command is given again. With torchrun several processes share a fit.
    """
    import torch
    from transformers.utils import logging

    from kvhub.fit.command import Options, fit
    from kvhub.fit.settings import (
        BEST_RECIPE,
        DEFAULT_RECIPE,
        FitSettings,
        parse_k,
        parse_lengths,
        parse_regularization,
        parse_training,
    )
    from kvhub.fit.source_text import Texts
    from kvhub.settings import Settings

    if max_memory is not None and max_memory != max_memory:  # a range lets NaN through
        raise BadInput("--max-memory nan is not a number of gigabytes", "--max-memory 8")
    longest, lengths = parse_lengths(length)
    if family == "mlp" and recipe == "default":
        recipe = "ridge"  # the same rows and layers; what the default adds is for matrices
    if recipe == "paper":
        given_lambda = click.get_current_context().get_parameter_source("regularization")
        if given_lambda != click.core.ParameterSource.DEFAULT and regularization != "paper":
            raise BadInput("--recipe paper is --lambda paper", "leave one of them out")
        regularization = "paper"
    added = {"default": DEFAULT_RECIPE, "best": BEST_RECIPE}.get(recipe, {})
    if normalise_keys != "auto":
        added = added | {"normalise_keys": normalise_keys}
    settings = FitSettings(
        k=parse_k(k) if k is not None else FitSettings.k,
        regularization=parse_regularization(regularization),
        recipe=None if recipe == "ridge" else recipe,
        tries=tries,
        **added,
        support=support,
        sequences=sequences,
        length=longest,
        lengths=lengths,
        stride=stride,
        exact_prefix=exact_prefix,
        store_dtype=store_dtype,
        seed=seed,
        train=parse_training(
            family, distill, hidden, networks, epochs, batch, default=recipe in ("default", "best")
        ),
    )
    given = Texts.parse(texts, datasets)
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: no GPU can be used here", "use --device cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    logging.disable_progress_bar()  # one bar a fit, and it is ours
    cache = Settings.load().cache
    with FitProgress() as progress:
        stored = fit(
            source,
            target,
            lambda tokenizer: given.read(tokenizer, settings, cache),
            settings,
            both=both,
            dtype=None if dtype == "auto" else getattr(torch, dtype),
            options=Options(
                k_as_possible=k is None,
                device=device,
                output=output,
                checkpoint=checkpoint,
                every=checkpoint_every,
                captures=captures,
                low_memory=low_memory,
                memory=None if max_memory is None else int(max_memory * 1e9),
                progress=progress,
                say=progress.say,
            ),
        )
    for artifact in stored:
        manifest = artifact.manifest
        _print(artifact, (source, target), [str(path) for path, _ in given.files])
        width = settings.width(manifest.source.geometry, manifest.k)
        if manifest.calibration.rows < _FEW * width:
            click.echo(
                f"note: {manifest.calibration.rows} rows for {width} features are few;"
                f" {_FEW * width} or more fit better",
                err=True,
            )
        source, target = target, source


def _print(stored: Stored, models: tuple[str, str], texts: list[str]) -> None:
    import shlex

    manifest = stored.manifest
    scores, calibration = manifest.fit_scores, manifest.calibration
    click.echo(f"{manifest.source.name} -> {manifest.target.name}")
    click.echo(f"  digest   {manifest.digest}")
    click.echo(f"  size     {manifest.size / 1e6:.1f} MB in {stored.directory}")
    click.echo(
        f"  rows     {calibration.rows} from {calibration.sequences} windows of {calibration.length} tokens"
    )
    if chosen := manifest.selection:
        same = [p for p in chosen.curve if (p.k, p.regularization) == (chosen.k, chosen.regularization)]
        best = min(same, key=lambda point: point.kl)
        click.echo(
            f"  chosen   k {chosen.k}, lambda {manifest.regularization:g}: KL {best.kl:.3f}, attention cosine"
            f" {best.attention_cosine:.3f} on {chosen.windows} windows ({len(chosen.curve)} tried)"
        )
    if manifest.recipe:
        click.echo(f"  recipe   {manifest.recipe}")
    for name, r2 in (("keys", scores.r2_key), ("values", scores.r2_value)):
        worst = min(range(len(r2)), key=r2.__getitem__)
        click.echo(f"  R2 {name:<6} {sum(r2) / len(r2):.3f} held out (worst {r2[worst]:.3f}, layer {worst})")
    given = [arg for path in texts or ["FILE"] for arg in ("--text", path)]
    for option, model, side in zip(
        ("--source", "--target"), models, (manifest.source, manifest.target), strict=True
    ):
        if not side.revision.startswith("commit:"):
            given += [option, model]
    click.echo(f"  next     kvhub eval {manifest.digest[:12]} {shlex.join(given)}")


_NAMES = {
    "source": "running the source",
    "target": "running the target",
    "capture": "running both models",
    "choose": "choosing k and lambda",
    "solve": "solving",
    "distil": "distilling",
    "train": "training networks",
    "blocks": "solving blocks of layers",
    "score": "scoring held-out text",
}


class FitProgress:
    """Stages of a fit on stderr: a bar with the time left on a terminal, else a line now and then."""

    def __enter__(self) -> FitProgress:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True)
        self._tasks: dict[str, Any] = {}
        self._started: dict[str, float] = {}
        self._told = time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
            self._bar = Progress(*columns, *times, console=console)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        """A line of its own, above the bar."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            click.echo(line, err=True)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._bar is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._bar.add_task(_NAMES[stage], total=total)
            self._bar.update(self._tasks[stage], completed=done, total=total)
            return
        now = time.monotonic()
        started = self._started.setdefault(stage, now)
        if done == total or now - self._told >= _EVERY:
            self._told = now
            left = (now - started) / done * (total - done) if done else 0.0
            click.echo(f"{_NAMES[stage]}: {done}/{total}, {left:.0f} s left", err=True)
