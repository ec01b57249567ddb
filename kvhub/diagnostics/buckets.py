"""Positions in groups, for tables: the sink, 1-3, 4-15, ..."""

from __future__ import annotations

from collections.abc import Sequence

BUCKETS = (0, 1, 4, 16, 64, 256, 1024, 4096)
"""First position of every group."""


def by_bucket(errors: Sequence[float]) -> list[tuple[str, float]]:
    """Mean of errors by position in each group that has a position: `("4-15", 0.21)`."""
    length = len(errors)
    found = []
    for start, stop in zip(BUCKETS, (*BUCKETS[1:], length), strict=True):
        if start < length:
            inside = errors[start:stop]
            last = start + len(inside) - 1
            name = str(start) if last == start else f"{start}-{last}"
            found.append((name, sum(inside) / len(inside)))
    return found
