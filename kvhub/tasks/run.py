"""Tasks through lm-evaluation-harness's own API, once for each arm, and what the arms say together."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvhub.errors import BadInput, NotFound
from kvhub.evaluation.bootstrap import Array
from kvhub.evaluation.evidence import Arm
from kvhub.tasks.caches import Caches
from kvhub.tasks.local import digest, read_items, task_config
from kvhub.tasks.scores import TaskScores, require_arms, task_scores

METRICS = ("acc_norm", "acc", "exact_match", "f1", "em")
"""The first of these that a task reports is its accuracy."""


@dataclass(frozen=True)
class TaskSettings:
    """What is run, and on which arms."""

    arms: tuple[Arm, ...] = ("native", "source", "mapped")
    limit: int | None = None
    """Items of a task, from its beginning; None: all."""
    fewshot: int | None = None
    """Examples before each item; None: as the task says (a local file: none)."""
    chat: bool = False
    """Items as a conversation in the pair's chat template."""
    seed: int = 0


@dataclass(frozen=True)
class Task:
    """A task of the harness by name, or a local file under a name."""

    name: str
    path: Path | None = None
    items: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str) -> Task:
        """`NAME=FILE.jsonl`, or a task that the harness brings. Errors: `NotFound`, `BadInput`."""
        name, equals, path = text.partition("=")
        if not equals:
            return cls(name)
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise BadInput(f"{name!r} is no name for a task", "use NAME=FILE with letters, digits, - and _")
        return cls(name, Path(path), read_items(Path(path)))

    @property
    def digest(self) -> str | None:
        """sha256 of a local task's items."""
        return digest(self.items) if self.items else None


def run_tasks(
    tasks: Sequence[Task],
    caches: Caches,
    settings: TaskSettings,
    *,
    progress: Callable[[Arm, int], None] = lambda arm, done: None,
) -> list[TaskScores]:
    """Every task on every arm, same items in the same order.

    The harness's own tasks fetch their data; a local file needs nothing. Items are cut off after
    `limit`. Errors: `NotFound` (no such task, or its data cannot be fetched), `BadInput`.
    """
    if len({task.name for task in tasks}) != len(tasks):
        raise BadInput("two tasks have the same name")
    require_arms(settings.arms)
    answers: dict[str, dict[Arm, Array]] = {task.name: {} for task in tasks}
    metrics: dict[str, str] = {}
    floors: dict[str, float] = {}
    for arm in settings.arms:
        samples = _run_arm(tasks, caches, arm, settings, progress)
        for task in tasks:
            metrics[task.name], floors[task.name], values = _accuracy(task.name, samples[task.name])
            answers[task.name][arm] = values
    return [
        task_scores(task.name, metrics[task.name], floors[task.name], answers[task.name], seed=settings.seed)
        for task in tasks
    ]


def _run_arm(
    tasks: Sequence[Task],
    caches: Caches,
    arm: Arm,
    settings: TaskSettings,
    progress: Callable[[Arm, int], None],
) -> dict[str, list[dict[str, Any]]]:
    """Samples of each task by name; those of a group's members one after another."""
    with _quiet():
        from lm_eval import simple_evaluate
        from lm_eval.api.task import ConfigurableTask
        from lm_eval.tasks import TaskManager

        from kvhub.tasks.lm import MappedLM

        done = 0

        def tell() -> None:
            nonlocal done
            done += 1
            progress(arm, done)

        manager = TaskManager(include_defaults=any(task.path is None for task in tasks))
        found: dict[str, list[dict[str, Any]]] = {}
        for task in tasks:
            wanted: Any = task.name
            if task.path is not None:
                wanted = ConfigurableTask(config=task_config(task.name, task.items, settings.fewshot or 0))
            elif task.name not in manager.all_tasks:
                raise NotFound(
                    f"lm-evaluation-harness has no task {task.name!r}",
                    "lm-eval ls tasks lists them; a local file is NAME=FILE.jsonl",
                )
            results = _evaluate(
                simple_evaluate, task, MappedLM(caches, arm, progress=tell), wanted, manager, settings
            )
            found[task.name] = [
                sample for name in sorted(results["samples"]) for sample in results["samples"][name]
            ]
        return found


def _evaluate(
    simple_evaluate: Any, task: Task, model: Any, wanted: Any, manager: Any, settings: TaskSettings
) -> Any:
    try:
        return simple_evaluate(
            model=model,
            tasks=[wanted],
            num_fewshot=None if task.path is not None else settings.fewshot,
            limit=settings.limit,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
            task_manager=manager,
            bootstrap_iters=0,
            random_seed=settings.seed,
            numpy_random_seed=settings.seed,
            torch_random_seed=settings.seed,
            fewshot_random_seed=settings.seed,
        )
    except (OSError, RuntimeError) as error:
        if task.path is not None:
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NotFound(
            f"the data of task {task.name!r} cannot be fetched: {reason}",
            "check the connection, or give a local file: NAME=FILE.jsonl",
        ) from error


def _accuracy(name: str, samples: list[dict[str, Any]]) -> tuple[str, float, Array]:
    """Metric, accuracy of guessing, and `[items]`, in the order of the items."""
    if not samples:
        raise BadInput(f"task {name!r} gave no items")
    metric = next((m for m in METRICS if m in samples[0]), None)
    if metric is None:
        raise BadInput(f"task {name!r} reports none of {', '.join(METRICS)}")
    first = samples[0]["filter"]
    kept = [sample for sample in samples if sample["filter"] == first]
    floor = float(np.mean([1 / len(s["arguments"]) for s in kept])) if metric.startswith("acc") else 0.0
    return metric, floor, np.array([float(sample[metric]) for sample in kept])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The harness and the libraries under it log, warn and draw bars; only errors are kept.

    It also asks git for the commit of whatever directory it is run in, which complains where there is none.
    """
    names = ("lm_eval", "lm-eval", "datasets", "evaluate")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lm_eval.api.model
        import lm_eval.api.task
        import lm_eval.evaluator

        loud: list[tuple[Any, str, Any]] = [
            (lm_eval.api.model, "tqdm", _no_bar),
            (lm_eval.api.task, "tqdm", _no_bar),
            (lm_eval.evaluator, "get_git_commit_hash", lambda: None),
        ]
        kept = [getattr(module, name) for module, name, _ in loud]
        for module, name, quiet in loud:
            setattr(module, name, quiet)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            for (module, name, _), old in zip(loud, kept, strict=True):
                setattr(module, name, old)


def _no_bar(items: Any, *_: Any, **__: Any) -> Any:
    return items
