"""Which registered mappers a server may use; every refusal says what to do."""

from __future__ import annotations

from collections.abc import Sequence

from kvhub.errors import Incompatible, NotFound
from kvhub.model.identity import ModelIdentity
from kvhub_registry.records import MapperRow, State


def usable(
    rows: Sequence[MapperRow], target: ModelIdentity, *, what: str, allow_draft: bool = False
) -> MapperRow:
    """The mapper of `rows` to serve `target` with: ready before draft, then the newest.

    what: how the user named the rows, for messages.
    Errors: `NotFound` where `rows` is empty; `Incompatible` with code `revision`, `dtype`,
    `identity`, `retired` or `draft` where none fits the model that is about to be served.
    """
    if not rows:
        raise NotFound(
            f"no mapper from {what} to {target.name} is registered",
            "kvhub list shows what is there; kvhub fit makes one, kvhub pull fetches one",
        )
    fitting = [row for row in rows if row.target.digest == target.digest]
    if not fitting:
        raise _mismatch(rows[0], target)
    fitting.sort(key=lambda row: (row.state is State.READY, row.created), reverse=True)
    alive = [row for row in fitting if row.state is not State.RETIRED]
    if not alive:
        short = _short(fitting[0])
        hint = f"kvhub promote {short} brings it back where it passes the gate; kvhub list shows the others"
        raise Incompatible(f"mapper {short} is retired", hint, code="retired")
    best = alive[0]
    if best.state is not State.READY and not allow_draft:
        raise Incompatible(
            f"mapper {_short(best)} is a draft: {best.state_reason}",
            f"kvhub eval {_short(best)} judges it; --allow-draft serves it, and every response says so",
            code="draft",
        )
    return best


def _mismatch(row: MapperRow, target: ModelIdentity) -> Incompatible:
    fitted = row.target
    if fitted.revision != target.revision:
        return Incompatible(
            f"mapper {_short(row)} was fitted for {fitted.name} at {fitted.revision[:24]}, "
            f"this model is {target.revision[:24]}",
            "serve that revision, or fit a mapper for this one",
            code="revision",
        )
    if fitted.dtype != target.dtype:
        return Incompatible(
            f"mapper {_short(row)} was fitted for {fitted.dtype}, the server runs {target.dtype}",
            f"add: -- --dtype {fitted.dtype}",
            code="dtype",
        )
    return Incompatible(
        f"mapper {_short(row)} was fitted for the same weights with another tokenizer, RoPE or geometry",
        code="identity",
    )


def _short(row: MapperRow) -> str:
    return row.digest[:12]
