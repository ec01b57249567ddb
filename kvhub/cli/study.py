"""`kvhub study`: vary one thing of a fit and measure what it does."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import click

from kvhub.errors import BadInput

STUDIES = ("k", "lambda", "rope", "sequences", "domain", "direction", "composition")


@click.command()
@click.argument("study", type=click.Choice(STUDIES))
@click.argument("source")
@click.argument("target")
@click.option(
    "--text", "texts", type=click.Path(path_type=Path), multiple=True, required=True, metavar="FILE",
    help="Text to fit on and, its held-out side, to judge on; each file is a domain.",
)  # fmt: skip
@click.option(
    "--other", "others", type=click.Path(path_type=Path), multiple=True, metavar="FILE",
    help="Text to judge on only.",
)  # fmt: skip
@click.option(
    "--captures", type=click.Path(path_type=Path), required=True, metavar="DIR",
    help="Caches and recordings are kept here and reused, also by kvhub fit --captures.",
)  # fmt: skip
@click.option(
    "--k", default=None, metavar="N|all", show_default="8, or all layers where fewer",
    help="Where k is not what varies.",
)  # fmt: skip
@click.option(
    "--lambda", "regularization", default="1e-3", show_default=True, metavar="R|paper",
    help="Where lambda is not what varies.",
)  # fmt: skip
@click.option("--sequences", type=int, default=80, show_default=True, help="Windows to fit on, at most.")
@click.option("--length", type=int, default=512, show_default=True, help="Tokens in a window.")
@click.option("--stride", type=int, default=2, show_default=True, help="Every n-th token is a row.")
@click.option("--windows", type=click.IntRange(min=2), default=18, show_default=True, help="Held out.")
@click.option("--prefix", type=click.IntRange(min=1), default=384, show_default=True, help="Mapped tokens.")
@click.option("--tail", type=click.IntRange(min=2), default=128, show_default=True, help="Tokens scored.")
@click.option(
    "--dtype", type=click.Choice(["auto", "bfloat16", "float32"]), default="auto", show_default=True,
    help="Of both models' forwards.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Also write the rows as CSV.",
)  # fmt: skip
def command(
    study: str,
    source: str,
    target: str,
    texts: tuple[Path, ...],
    others: tuple[Path, ...],
    captures: Path,
    k: str | None,
    regularization: str,
    sequences: int,
    length: int,
    stride: int,
    windows: int,
    prefix: int,
    tail: int,
    dtype: str,
    output: Path | None,
) -> None:
    """Vary k, lambda, RoPE, the text or the direction, and print what each does to held-out text.

    Both models run once over the windows; after that a variant costs a solve and short
    tails. Rows are CSV on stdout, in nat a token, with 95 % intervals over windows.
    """
    import torch
    from transformers.utils import logging

    from kvhub.check import DEFAULT_K
    from kvhub.files import check_output, write_output
    from kvhub.fit.settings import FitSettings, parse_k, parse_regularization
    from kvhub.model.load import load_model
    from kvhub.model.pair import check_pair
    from kvhub.model.resolve import resolve
    from kvhub.study.pair import StudyPair, StudyText
    from kvhub.study.rows import Row, write_csv
    from kvhub.study.studies import STUDIES

    settings = FitSettings(
        k=DEFAULT_K if k is None else parse_k(k),
        regularization=parse_regularization(regularization),
        sequences=sequences,
        length=length,
        stride=stride,
    )
    if settings.automatic:
        raise BadInput("a study varies one thing: give --k and --lambda as numbers")
    if output is not None:
        check_output(output)
    logging.disable_progress_bar()
    chosen = None if dtype == "auto" else getattr(torch, dtype)
    one, two = (load_model(resolve(ref), chosen) for ref in (source, target))
    check_pair(one.identity, two.identity)
    shapes = one.identity.geometry, two.identity.geometry
    if k is None:
        settings = replace(settings, k=min(DEFAULT_K, *(shape.num_layers for shape in shapes)))
    settings.grid(shapes[0])
    text = StudyText.cut(
        texts, one.tokenizer, settings, windows=windows, prefix=prefix, tail=tail, others=others
    )
    pair = StudyPair(one, two, text, settings, captures, tell=_tell)
    rows: list[Row] = []
    for row in STUDIES[study](pair):
        rows.append(row)
        click.echo(
            f"{row.variant} {row.domain}: excess NLL {row.excess_nll:.3f} [{row.low:.3f}, {row.high:.3f}]",
            err=True,
        )
    if not rows:
        raise BadInput(
            "no variant could be fitted: there are fewer rows than a regression has inputs",
            "more --sequences or --text, a smaller --stride or --k",
        )
    write_csv(rows, sys.stdout)
    if output is not None:
        whole = io.StringIO()
        write_csv(rows, whole)
        write_output(output, whole.getvalue().encode())


def _tell(stage: str, done: int, total: int) -> None:
    if stage in ("record", "capture") and (done == total or done % 20 == 0):
        click.echo(f"{stage}: {done}/{total}", err=True)
