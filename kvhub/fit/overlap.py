"""Held-out documents that repeat the calibration text are not held out.

Web text is full of templates: two articles from one template are different
documents and nearly the same text. A held-out document is dropped where at
least 5 % of its 13-word runs also occur on the calibration side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

RUN = 13
LIMIT = 0.05


def drop_overlapping(
    held_out: Sequence[str], calibration: Iterable[str], *, run: int = RUN, limit: float = LIMIT
) -> list[str]:
    """The documents of `held_out` that share less than `limit` of their word runs with `calibration`.

    A document shorter than `run` words counts as one run. Memory grows with
    `held_out` only; `calibration` is streamed.
    """
    own = [set(_runs(document, run)) for document in held_out]
    wanted = set().union(*own) if own else set()
    seen: set[int] = set()
    for document in calibration:
        seen.update(wanted.intersection(_runs(document, run)))
    return [
        document
        for document, runs in zip(held_out, own, strict=True)
        if len(runs & seen) < max(limit * len(runs), 1e-9)
    ]


def _runs(document: str, run: int) -> Iterator[int]:
    words = document.split()
    for start in range(max(len(words) - run + 1, 1)):
        yield hash(tuple(words[start : start + run]))
