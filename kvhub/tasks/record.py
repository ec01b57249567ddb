"""`assets/tasks.json` beside the manifest: task scores bound to a mapper's digest."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import kvhub
from kvhub.artifact.manifest import Manifest
from kvhub.files import write_bytes
from kvhub.tasks.conversation import Turn
from kvhub.tasks.run import Task, TaskSettings
from kvhub.tasks.scores import TaskScores, overall

NAME = "assets/tasks.json"


def describe(
    manifest: Manifest,
    tasks: list[Task],
    settings: TaskSettings,
    scores: list[TaskScores],
    turns: list[Turn],
    *,
    exact_prefix: int,
) -> dict[str, Any]:
    """All of a run as plain JSON; what is undefined is null. exact_prefix: native rows of mapped caches."""
    found: dict[str, Any] = _plain(
        {
            "schema_version": 1,
            "mapper": manifest.digest,
            "kvhub_version": kvhub.__version__,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": asdict(settings) | {"exact_prefix": exact_prefix},
            "items": {task.name: task.digest for task in tasks},
            "tasks": [asdict(score) for score in scores],
            "overall": asdict(overall(scores)) if scores else None,
            "turns": [asdict(turn) for turn in turns],
        }
    )
    return found


def write_record(directory: Path, record: dict[str, Any]) -> Path | None:
    """Put the record beside the manifest, whole or not at all. Returns where the one before it is now.

    A run may have taken hours: the next one, of other tasks, does not replace it. Errors: `OSError`.
    """
    place = directory / NAME
    place.parent.mkdir(exist_ok=True)
    before = None
    if place.exists():
        before = next(p for n in count(1) if not (p := place.with_name(f"tasks-{n}.json")).exists())
        place.rename(before)
    write_bytes(place, to_bytes(record))
    return before


def to_bytes(record: dict[str, Any]) -> bytes:
    """The record as it is written."""
    return json.dumps(record, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
