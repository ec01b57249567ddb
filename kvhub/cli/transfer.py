"""`kvhub transfer`: from a few hundred tokens, whether a pair will work and what to fit."""

from __future__ import annotations

from pathlib import Path

import click

from kvhub.cli import output
from kvhub.cli.output import Column
from kvhub.errors import BadInput


@click.command()
@click.argument("source")
@click.argument("target")
@click.option(
    "--text", "texts", type=click.Path(path_type=Path), multiple=True, required=True, metavar="FILE",
    help="Text to run both models on; repeat for more.",
)  # fmt: skip
@click.option("--windows", type=click.IntRange(3, 100), default=6, show_default=True, help="Over all texts.")
@click.option("--prefix", type=click.IntRange(min=8), default=96, show_default=True, help="Tokens mapped.")
@click.option("--tail", type=click.IntRange(min=2), default=32, show_default=True, help="Tokens judged by.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@output.format_option("table", "json")
def command(
    source: str,
    target: str,
    texts: tuple[Path, ...],
    windows: int,
    prefix: int,
    tail: int,
    dtype: str,
    device: str,
    form: str,
) -> None:
    """Say from a few hundred tokens whether SOURCE to TARGET will work, and which k and support to try.

    Both models run on the windows; every candidate is fitted on two thirds of them and judged on the
    rest. Little text makes every candidate worse than a fit will be: the order is what counts.
    """
    import torch
    from transformers.utils import logging

    from kvhub.cli.models import known_device
    from kvhub.evaluation.text import held_out_windows
    from kvhub.model.load import load_model
    from kvhub.model.pair import check_pair
    from kvhub.model.resolve import resolve
    from kvhub.model.tokenizer import load_tokenizer
    from kvhub.transfer.advise import advise, candidates, kept
    from kvhub.transfer.probe import probe_pair

    logging.disable_progress_bar()
    paths = [resolve(source), resolve(target)]
    count = max(windows, 2 * len(texts))
    domains = held_out_windows(texts, load_tokenizer(paths[0]), count=count, length=prefix + tail)
    cut = torch.cat(list(domains.values()))
    if len(cut) < 3:
        raise click.UsageError("the text gives fewer than 3 windows; give more text or a shorter --prefix")
    if len(torch.unique(cut, dim=0)) < len(cut):
        raise BadInput(
            "the same text is there twice: candidates would be judged on what they were fitted on",
            "give every text once",
        )
    device = known_device(device)
    here, there = (load_model(path, getattr(torch, dtype), device=device) for path in paths)
    check_pair(here.identity, there.identity)
    shapes = here.identity.geometry, there.identity.geometry
    probe = probe_pair(here, there, cut, candidates(*shapes), tail=tail)
    found = advise(probe, shapes[0].num_kv_heads)
    if form == "json":
        output.as_json(found.record())
        return
    output.table(
        [
            Column("k", "K", right=True),
            Column("support", "SUPPORT"),
            Column("kept", "CONTEXT KEPT", right=True),
            Column("kl", "KL", right=True),
            Column("top1", "TOP-1", right=True),
            Column("cosine", "ATTENTION COSINE", right=True),
            Column("keys", "OF KEYS", right=True),
        ],
        [
            {
                "k": str(one.k),
                "support": one.support,
                "kept": f"{kept(one, probe):.1%}",
                "kl": f"{one.kl:.3f}",
                "top1": f"{one.top1:.3f}",
                "cosine": f"{one.attention_cosine:.3f}",
                "keys": f"{one.key_share:.0%}",
            }
            for one in probe.outcomes
        ],
    )
    click.echo()
    click.echo(f"tokens       {probe.tokens} mapped, {len(cut)} windows; no context: KL {probe.kl_empty:.3f}")
    click.echo(
        f"verdict      {found.verdict}: the best candidate keeps {found.context_kept:.0%} of the context"
    )
    click.echo(f"try          kvhub fit ... --k {found.k} --support {found.support}")
    for note in found.notes:
        click.echo(f"note         {output.clean(note)}")
