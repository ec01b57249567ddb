"""What tensor-parallel ranks must agree on, or their collectives no longer meet.

Every rank runs the same scheduler on the same requests in the same order. What a rank
knows alone (a clock, whether its reads are done, a learnt cost) may steer it only
through one of these, which are called at the same points on every rank.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

T = TypeVar("T")


class RanksFailed(RuntimeError):
    """The ranks cannot agree any more; raised on every rank that still answers."""


class Ranks(Protocol):
    """The ranks of one server. The methods are called on the scheduler's thread alone.

    failed: why this rank must stop; told to the others in the next call, so that all
    stop at the same point.
    """

    size: int
    rank: int
    failed: str

    def share(self, value: T) -> T:
        """Rank 0's value, on every rank. value: numbers, strings, lists and dicts of them."""

    def all(self, ok: bool) -> bool:
        """Whether it is true on every rank."""

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers, which are 0 or more."""


class OneRank:
    """A server without tensor parallelism: it agrees with itself."""

    size = 1
    rank = 0
    failed = ""

    def share(self, value: T) -> T:
        return value

    def all(self, ok: bool) -> bool:
        return ok

    def least(self, number: int) -> int:
        return number
