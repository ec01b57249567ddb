"""`kvhub tasks`: what a mapper keeps of the target's accuracy on tasks."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from kvhub.cli import output
from kvhub.errors import BadInput

if TYPE_CHECKING:
    from kvhub.evaluation.bootstrap import Estimate
    from kvhub.evaluation.evidence import Arm
    from kvhub.tasks.conversation import Turn
    from kvhub.tasks.scores import TaskScores

OTHER_TEXT = (
    "The harbour office opens at seven. Boats that leave before then put a note into the grey box, with"
    " the name of the boat, how many are on board and when they mean to be back. Nobody reads them in summer."
)
"""What the arm wrong-document maps: a text of no task."""
ARMS = ("native", "source", "mapped", "empty", "wrong-document")


@click.command()
@click.argument("mapper")
@click.option(
    "--task", "names", multiple=True, metavar="NAME[=FILE]",
    help="A task of lm-evaluation-harness (arc_challenge, mmlu, ...), or a local JSONL file. Repeat.",
)  # fmt: skip
@click.option(
    "--conversations", type=click.Path(path_type=Path), metavar="FILE",
    help="Conversations as CoQA writes them: F1 turn by turn.",
)  # fmt: skip
@click.option(
    "--turns", type=click.IntRange(1, 100), default=10, show_default=True, help="Of a conversation."
)
@click.option("--limit", type=click.IntRange(min=2), help="Items of each task, or conversations.")
@click.option("--fewshot", type=click.IntRange(min=0), help="Examples before an item [default: the task's].")
@click.option("--chat", is_flag=True, help="Items as a conversation in the pair's chat template.")
@click.option(
    "--arm", "arms", type=click.Choice(ARMS), multiple=True, default=("native", "source", "mapped"),
    show_default=True, help="What stands before the answer. Repeat.",
)  # fmt: skip
@click.option("--source", metavar="MODEL", help="The source model, if not the Hub model it was fitted on.")
@click.option("--target", metavar="MODEL", help="The target model, likewise.")
@click.option(
    "--exact-prefix", type=click.IntRange(min=0), help="First tokens native [default: the mapper's]."
)
@click.option(
    "--output", "place", type=click.Path(path_type=Path), metavar="FILE", help="Write JSON here too."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@output.format_option("table", "json")
def command(
    mapper: str,
    names: tuple[str, ...],
    conversations: Path | None,
    turns: int,
    limit: int | None,
    fewshot: int | None,
    chat: bool,
    arms: tuple[str, ...],
    source: str | None,
    target: str | None,
    exact_prefix: int | None,
    place: Path | None,
    seed: int,
    device: str,
    form: str,
) -> None:
    """Answer tasks on MAPPER's mapped cache, and beside it on the target's own.

    Writes assets/tasks.json beside the manifest; one that is there is kept as tasks-1.json, and so on.
    Needs kvhub[tasks].
    """
    _demand_harness()
    import torch
    from transformers.utils import logging

    from kvhub.cli.models import load_models, locate_models
    from kvhub.files import check_output, write_output
    from kvhub.mapper.load import load_mapper, locate
    from kvhub.model.placement import input_device
    from kvhub.tasks import record
    from kvhub.tasks.caches import Caches
    from kvhub.tasks.conversation import read_conversations, run_conversations
    from kvhub.tasks.run import Task, TaskSettings, run_tasks
    from kvhub.tasks.scores import require_arms

    logging.disable_progress_bar()
    if not names and conversations is None:
        raise BadInput("there is no task", "give --task NAME[=FILE], or --conversations FILE")
    tasks = [Task.parse(name) for name in names]
    talks = [] if conversations is None else read_conversations(conversations, limit=limit)
    chosen = cast("tuple[Arm, ...]", tuple(dict.fromkeys(arms)))
    require_arms(chosen)
    settings = TaskSettings(arms=chosen, limit=limit, fewshot=fewshot, chat=chat, seed=seed)
    directory = locate(mapper)
    for wanted in (directory / record.NAME, *([] if place is None else [place])):
        check_output(wanted)  # now, not after hours
    loaded = load_mapper(directory)
    manifest = loaded.manifest
    paths = locate_models(manifest, source, target)
    here, there = load_models(manifest, paths, device)
    other = torch.tensor(here.tokenizer.encode(OTHER_TEXT, add_special_tokens=False))
    caches = Caches(loaded.to(input_device(here.model)), here, there, exact_prefix=exact_prefix, other=other)
    told = [time.monotonic()]

    def progress(arm: str, done: int) -> None:
        if time.monotonic() - told[0] >= 30:
            told[0] = time.monotonic()
            output.note(f"{arm}: {done} done")

    if chat and not here.tokenizer.chat_template:
        raise BadInput("the pair has no chat template", "leave --chat out")
    scores = run_tasks(tasks, caches, settings, progress=progress) if tasks else []
    table = (
        run_conversations(talks, caches, chosen, turns=turns, seed=seed, progress=progress) if talks else []
    )
    found = record.describe(manifest, tasks, settings, scores, table, exact_prefix=caches.exact_prefix)
    if form == "json":
        click.echo(record.to_bytes(found).decode(), nl=False)
    else:
        _print(scores, table)
    before = record.write_record(directory, found)
    if before is not None:
        output.note(f"the record that was there is {before} now")
    if place is not None:
        write_output(place, record.to_bytes(found))


def _demand_harness() -> None:
    import importlib.util

    if importlib.util.find_spec("lm_eval") is None:
        raise BadInput("lm-evaluation-harness is not installed", "pip install 'kvhub[tasks]'")


def _print(scores: list[TaskScores], turns: list[Turn]) -> None:
    from kvhub.tasks.scores import overall

    for score in scores:
        click.echo(f"{score.name}  n {score.n}, {score.metric}, chance {score.chance:.3f}")
        for arm, accuracy in score.accuracy.items():
            click.echo(f"  {arm:<18}{_shown(accuracy)}")
        click.echo(f"  {'retention':<18}{_shown(score.retention)}")
        click.echo(f"  {'floor-normalised':<18}{_shown(score.floor_normalised)}")
        gap = "no gap beyond chance" if score.gap_recovered is None else _shown(score.gap_recovered)
        click.echo(f"  {'gap recovered':<18}{gap}")
    if len(scores) > 1:
        total = overall(scores)
        click.echo(
            f"mean retention {_number(total.retention)}, "
            f"floor-normalised {_number(total.floor_normalised)}, "
            f"worst {total.worst_task} {_number(total.worst_retention)}"
        )
    for turn in turns:
        arms = "  ".join(f"{arm} {_shown(value)}" for arm, value in turn.f1.items())
        click.echo(f"turn {turn.turn:<3} n {turn.n:<4} F1 {arms}  drift {_shown(turn.drift)}")
    sys.stdout.flush()


def _number(value: float) -> str:
    return f"{value:.3f}" if value == value else "undefined"


def _shown(value: Estimate) -> str:
    return (
        f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"
        if value.value == value.value
        else "undefined"
    )
