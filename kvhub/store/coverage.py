"""A family of models as a directed table: for each ordered pair the mapper that counts, and what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from kvhub.errors import BadInput
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

    def headings(self) -> list[str]:
        """Short names of `models`: without the organisation where no other model is called so."""
        short = [name.rpartition("/")[2] for name in self.models]
        several = Counter(name.casefold() for name in short)
        return [
            name if several[one.casefold()] > 1 else one for name, one in zip(self.models, short, strict=True)
        ]

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

    A model is its full name in any case: `Qwen/Qwen3-8B` and `unsloth/Qwen3-8B` are two.
    served: model name to the revision (a commit, or its beginning) that is served now; for the others
    the newest mapper that names a model says which revision is its newest.
    Errors: `BadInput` for a name in `models` or `served` without organisation that several models have.
    """
    names: dict[str, str] = {}
    newest: dict[str, tuple[datetime, str]] = {}
    known: dict[str, list[ModelRecord]] = {}
    for row in rows:
        for model in (row.source, row.target):
            key = _key(model.name)
            known.setdefault(key, []).append(model)
            if key not in newest or newest[key][0] < row.created:
                newest[key], names[key] = (row.created, model.revision), model.name
    wanted = {key for key in names if family is None or _begins(key, family.casefold())}
    for name in models:
        key = _meant(name, names)
        names.setdefault(key, name)
        wanted.add(key)
    current = {key: revision for key, (_, revision) in newest.items()}
    current |= {_meant(name, names): revision for name, revision in (served or {}).items()}
    now = {
        key: Current(revision, {model.digest for model in known.get(key, ()) if _at(model, revision)})
        for key, revision in current.items()
    }
    keys = sorted(wanted, key=lambda key: (slug(key), key))
    pairs: dict[tuple[str, str], list[MapperRow]] = {}
    for row in rows:
        pairs.setdefault((_key(row.source.name), _key(row.target.name)), []).append(row)
    cells = [_cell(names[s], names[t], pairs.get((s, t), []), now) for s in keys for t in keys if s != t]
    return Coverage([names[key] for key in keys], cells)


def unknown(rows: Sequence[MapperRow], models: Iterable[str], served: Iterable[str]) -> list[str]:
    """Names in `served` that neither a row nor `models` has: what they say changes nothing."""
    names = {_key(model.name): model.name for row in rows for model in (row.source, row.target)}
    names |= {_meant(name, names): name for name in models}
    return [name for name in served if _meant(name, names) not in names]


@dataclass(frozen=True)
class Current:
    """What is served of a model, or newest: its revision, and the identities that are known at it."""

    revision: str
    digests: set[str]


def _key(name: str) -> str:
    """A model's full name in lower case, without a revision."""
    head, at, _ = name.strip().rpartition("@")
    return (head if at and head else name.strip()).rstrip("/").casefold()


def _begins(key: str, family: str) -> bool:
    return key.startswith(family) or slug(key).startswith(family)


def _meant(name: str, names: Mapping[str, str]) -> str:
    """The key of the model that somebody names, with its organisation or without."""
    key = _key(name)
    if key in names or "/" in key:
        return key
    found = sorted(one for one in names if slug(one) == key)
    if len(found) > 1:
        several = ", ".join(names[one] for one in found)
        raise BadInput(f"{name} is the name of {len(found)} models: {several}", "give the full name")
    return found[0] if found else key


def _cell(source: str, target: str, rows: Sequence[MapperRow], current: Mapping[str, Current]) -> Cell:
    found = [Cell(source, target, *_standing(row, current)) for row in rows]
    if not found:
        return Cell(source, target, "missing")
    # rows come newest first, so the newest of the best stands
    return min(found, key=lambda cell: _RANK[cell.standing])


def _standing(row: MapperRow, current: Mapping[str, Current]) -> tuple[Standing, MapperRow, str]:
    if row.state is State.RETIRED:
        return "retired", row, row.state_reason
    for model in (row.source, row.target):
        now = current[_key(model.name)]
        # the same bytes under another commit are the same model
        if not _at(model, now.revision) and model.digest not in now.digests:
            why = f"{model.name} is at {_short(now.revision)} now, not at {_short(model.revision)}"
            return "stale", row, why
    if row.state is State.READY:
        return "ready", row, row.state_reason
    measured = any(score.arm == "mapped" and score.domain == "all" for score in row.scores)
    return ("failing" if measured else "draft"), row, row.state_reason


def _at(model: ModelRecord, revision: str) -> bool:
    found, wanted = (text.rpartition(":")[2] for text in (model.revision, revision))
    return found.startswith(wanted)


def _short(revision: str) -> str:
    return revision.rpartition(":")[2][:12]


def today() -> datetime:
    """Now, in UTC."""
    return datetime.now(UTC)
