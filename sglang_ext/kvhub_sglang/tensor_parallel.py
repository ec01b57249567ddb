"""Tensor parallelism: ranks that decide together, each with its own KV heads.

Every rank runs SGLang's scheduler on the same requests; if one of them reused a prefix
and another did not, their forwards would never meet again. So rank 0 decides, and what
can fail on one rank alone is agreed on before anything depends on it (`Ranks`).

The group is one of kvhub's own, over gloo, with a short time limit: SGLang's own
broadcasts survive whatever happens here.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from kvhub.exchange.shards import HeadSlice
from kvhub_sglang.namespace import Salts
from kvhub_sglang.ranks import OneRank, Ranks, RanksFailed
from kvhub_sglang.refusal import Code, Refusal

if TYPE_CHECKING:
    from kvhub_sglang.serving import Serving

T = TypeVar("T")

TIME_LIMIT = timedelta(seconds=30)
"""After this a rank that does not answer is taken for lost, and kvhub switches itself off."""

_ROOM = 1024
_HEAD = 8
_SHARE, _LEAST = 1, 2


class GlooRanks:
    """`Ranks` over a gloo process group.

    One collective for each call, a fixed-size gather: every rank sees what every other
    one is doing, so a rank that failed, or that is at another point, is noticed by all in
    the same call instead of holding them up.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank = int(dist.get_rank(group))
        self.size = int(dist.get_world_size(group))
        self.failed = ""
        """Why this rank must stop; told to the others in the next call."""
        self._broken = False

    def share(self, value: T) -> T:
        """Rank 0's value on every rank, through JSON: numbers, strings, lists and dicts of them."""
        mine = json.dumps(value).encode() if self.rank == 0 else None
        size, data = self._gather(_SHARE, len(mine or b""), mine or b"")[0]
        if size > _ROOM - _HEAD:
            data = self._long(mine, size)
        if self.rank == 0:
            return value
        shared: T = json.loads(data)
        return shared

    def all(self, ok: bool) -> bool:
        """Whether it is true on every rank."""
        return self.least(int(ok)) == 1

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers, which are 0 or more."""
        return min(size for size, _ in self._gather(_LEAST, number, b""))

    def _gather(self, kind: int, number: int, data: bytes) -> list[tuple[int, bytes]]:
        """What each rank says in this call. `RanksFailed` if one cannot go on, or does something else."""
        if self._broken:
            raise RanksFailed("the ranks have parted")
        text = data if len(data) <= _ROOM - _HEAD else b""
        head = bytes((kind, bool(self.failed), 0, 0)) + number.to_bytes(4, "little")
        mine = torch.frombuffer(bytearray((head + text).ljust(_ROOM, b"\0")), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(every, mine, group=self.group)
        except RuntimeError as error:
            self._broken = True
            raise RanksFailed(f"a rank does not answer: {str(error).splitlines()[0]}") from None
        said = [bytes(row.numpy()) for row in every]
        failed = [rank for rank, row in enumerate(said) if row[1]]
        if failed or len({row[0] for row in said}) > 1:
            self._broken = True
            why = self.failed or (
                f"rank {failed[0]} failed" if failed else "the ranks are at different points"
            )
            raise RanksFailed(why)
        numbers = [int.from_bytes(row[4:8], "little") for row in said]
        return [(n, row[_HEAD : _HEAD + n]) for n, row in zip(numbers, said, strict=True)]

    def _long(self, data: bytes | None, size: int) -> bytes:
        """A value that did not fit the gather."""
        buffer = torch.zeros(size, dtype=torch.uint8)
        if data is not None:
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            dist.broadcast(buffer, group_src=0, group=self.group)
        except RuntimeError as error:
            self._broken = True
            raise RanksFailed(f"a rank does not answer: {str(error).splitlines()[0]}") from None
        return bytes(buffer.numpy())


def open_ranks(ctx: Any, *, time_limit: timedelta = TIME_LIMIT) -> Ranks:
    """The ranks of this server; ctx is SGLang's `TreeCacheBuildContext`.

    Makes a group, which every rank must do at the same point: call it first, whatever
    may be refused later.
    """
    if ctx.tp_size <= 1:
        return OneRank()
    members = dist.get_process_group_ranks(ctx.params.attn_tp_cache_group)
    return GlooRanks(dist.new_group(members, backend="gloo", timeout=time_limit))


def join(serving: Serving) -> None:
    """What ranks that serve together must have in common; `Refusal` on all where they do not.

    They take rank 0's nonce for the lossy namespace, and use the mappers that every rank
    could load.
    """
    ranks = serving.ranks
    if ranks.size == 1:
        return
    local = {"exchange", "model_path", "cost_file"}  # where things are may differ by machine
    policy = serving.settings.model_dump(mode="json", exclude=local)
    for served in policy["mappers"]:
        served.pop("path", None)
    if not ranks.all(ranks.share([policy, serving.digest]) == [policy, serving.digest]):
        raise Refusal(Code.UNSUPPORTED, "the ranks have different settings or models")
    serving.salts = Salts(ranks.share(serving.salts.nonce))
    have = {candidate.digest for candidate in serving.candidates}
    usable = {digest for digest in ranks.share(sorted(have)) if ranks.all(digest in have)}
    serving.candidates = tuple(c for c in serving.candidates if c.digest in usable)


def heads_of(ranks: Ranks, total: int) -> HeadSlice:
    """Which of `total` KV heads this rank's pool holds. Errors: `Refusal`."""
    try:
        return HeadSlice.of_rank(ranks.rank, ranks.size, total)
    except ValueError:
        raise Refusal(Code.UNSUPPORTED, f"{total} KV heads on {ranks.size} ranks are not supported") from None


def publishes(ranks: Ranks, total: int) -> bool:
    """Whether this rank is the first that holds its heads."""
    mine = HeadSlice.of_rank(ranks.rank, ranks.size, total)
    return ranks.rank == 0 or HeadSlice.of_rank(ranks.rank - 1, ranks.size, total) != mine
