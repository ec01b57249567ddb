"""A family of models as a directed table: for each ordered pair the mapper that counts, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from kvhub_registry import MapperRow, ModelRecord, State
from kvhub_registry.names import slug

Standing = Literal["ready", "draft", "failing", "stale", "retired", "missing"]
STANDINGS: tuple[Standing, ...] = ("ready", "stale", "failing", "draft", "retired", "missing")
_RANK = {standing: rank for rank, standing in enumerate(STANDINGS)}
"""Of several mappers of a pair, the one that counts first."""


@dataclass(frozen=True)
class Cell:
    """One ordered pair.

    `failing` was measured and does not pass the gate; `draft` was not measured; `stale` was fitted on a
    revision of one side that is not the newest known (or not the one that is served).
    """

    source: str
    target: str
    standing: Standing
    row: MapperRow | None = None
    why: str = ""

    def age_days(self, now: datetime) -> float | None:
        """Days since the mapper was fitted."""
        return None if self.row is None else max(0.0, (now - self.row.created).total_seconds() / 86400)


@dataclass(frozen=True)
class Coverage:
    """All ordered pairs of `models`, in their order."""

    models: list[str]
    cells: list[Cell]

    def cell(self, source: str, target: str) -> Cell:
        """The cell of one pair."""
        return next(cell for cell in self.cells if (cell.source, cell.target) == (source, target))

    def count(self, standing: Standing) -> int:
        """How many pairs stand so."""
        return sum(cell.standing == standing for cell in self.cells)


def coverage(
    rows: Sequence[MapperRow],
    *,
    family: str | None = None,
    models: Iterable[str] = (),
    served: Mapping[str, str] | None = None,
) -> Coverage:
    """The table of all models that the rows name and that begin with `family`, and of `models`.

    served: model name to the revision (a commit, or its beginning) that is served now; for the others
    the newest mapper that names a model says which revision is its newest.
    """
    names: dict[str, str] = {}
    newest: dict[str, tuple[datetime, str]] = {}
    for row in rows:
        for model in (row.source, row.target):
            key = slug(model.name)
            if key not in newest or newest[key][0] < row.created:
                newest[key], names[key] = (row.created, model.revision), model.name
    wanted = {key for key in names if family is None or key.startswith(family.casefold())}
    for name in models:
        names.setdefault(slug(name), name)
        wanted.add(slug(name))
    current = {key: revision for key, (_, revision) in newest.items()}
    current |= {slug(name): revision for name, revision in (served or {}).items()}
    keys = sorted(wanted)
    pairs: dict[tuple[str, str], list[MapperRow]] = {}
    for row in rows:
        pairs.setdefault((slug(row.source.name), slug(row.target.name)), []).append(row)
    cells = [_cell(names[s], names[t], pairs.get((s, t), []), current) for s in keys for t in keys if s != t]
    return Coverage([names[key] for key in keys], cells)


def _cell(source: str, target: str, rows: Sequence[MapperRow], current: Mapping[str, str]) -> Cell:
    found = [Cell(source, target, *_standing(row, current)) for row in rows]
    if not found:
        return Cell(source, target, "missing")
    # rows come newest first, so the newest of the best stands
    return min(found, key=lambda cell: _RANK[cell.standing])


def _standing(row: MapperRow, current: Mapping[str, str]) -> tuple[Standing, MapperRow, str]:
    if row.state is State.RETIRED:
        return "retired", row, row.state_reason
    for model in (row.source, row.target):
        now = current[slug(model.name)]
        if not _same(model, now):
            return "stale", row, f"{model.name} is at {_short(now)} now, not at {_short(model.revision)}"
    if row.state is State.READY:
        return "ready", row, row.state_reason
    measured = any(score.arm == "mapped" and score.domain == "all" for score in row.scores)
    return ("failing" if measured else "draft"), row, row.state_reason


def _same(model: ModelRecord, revision: str) -> bool:
    found, wanted = (text.rpartition(":")[2] for text in (model.revision, revision))
    return found.startswith(wanted)


def _short(revision: str) -> str:
    return revision.rpartition(":")[2][:12]


def today() -> datetime:
    """Now, in UTC."""
    return datetime.now(UTC)
