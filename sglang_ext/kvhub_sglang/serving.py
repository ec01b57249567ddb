"""Everything one server process knows for handoffs: identity, mappers, exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from kvhub.exchange import Exchange, Layout
from kvhub.exchange.shards import HeadSlice
from kvhub.serving.cost import CostModel
from kvhub_sglang.internal import InternalRequests
from kvhub_sglang.namespace import Salts
from kvhub_sglang.publisher import Publisher
from kvhub_sglang.ranks import OneRank, Ranks
from kvhub_sglang.report import Metrics, logger
from kvhub_sglang.settings import ServingSettings
from kvhub_sglang.stage import Stager

if TYPE_CHECKING:
    from kvhub.mapper import Mapper
    from kvhub.model.identity import ModelIdentity


@dataclass(frozen=True, eq=False)
class Candidate:
    """A mapper that this server may apply, and the layout of its source's blocks."""

    mapper: Mapper
    digest: str
    source: ModelIdentity
    draft: bool
    served_exact_prefix: int = 0
    """What the server's settings ask for beyond the mapper's own exact prefix."""
    native_tail: int = 0
    """Last tokens of what could be mapped that the target computes."""
    first_head: int = 0
    """The first KV head of the target that this rank's part of the mapper writes."""
    make_ready: Callable[[], None] = lambda: None
    """Have the mapper ready before a request is admitted; called on a worker. Quick where it is."""
    min_span: int = 1
    """Tokens that reuse by it must save, where that is more than the server asks for."""
    max_hops: int = 8
    """Mappers that may lie under its rows, where that is fewer than the server allows."""
    max_turn: int | None = None
    """The last turn of a conversation that it is used for."""

    @property
    def exact_prefix(self) -> int:
        """First tokens that the target must hold exactly."""
        return max(self.mapper.manifest.exact_prefix, self.served_exact_prefix)

    @cached_property
    def source_digest(self) -> str:
        return self.source.digest

    @cached_property
    def source_heads(self) -> HeadSlice:
        """KV heads of the source that the mapper reads; with head-local support, the target's own."""
        total = self.source.geometry.num_kv_heads
        count = self.mapper.manifest.source.geometry.num_kv_heads
        return HeadSlice(self.first_head if count < total else 0, count, total)

    @cached_property
    def layout(self) -> Layout:
        """What the mapper reads: under tensor parallelism, the heads that this rank's part needs."""
        return layout_of(self.mapper.manifest.source)

    def serves_turn(self, turn: int | None) -> bool:
        """Whether it is used in this turn of a conversation (None: nobody said which)."""
        return self.max_turn is None or (turn is not None and turn <= self.max_turn)

    def named(self, names: frozenset[str]) -> bool:
        """Whether a request's list of sources names this one (name or digest)."""
        name = self.source.name.casefold()
        return bool({name, name.rsplit("/", 1)[-1], self.source_digest} & names)


@dataclass
class Serving:
    """Fixed at start, but for mappers that are withdrawn."""

    settings: ServingSettings
    identity: ModelIdentity
    candidates: tuple[Candidate, ...]
    exchange: Exchange
    page_size: int
    metrics: Metrics
    salts: Salts = field(default_factory=Salts)
    stream: torch.Stream | None = None
    """The stream that forwards run on (CUDA); rows are placed in its order."""
    ranks: Ranks = field(default_factory=OneRank)
    heads: int | None = None
    """KV heads in this rank's pool; None: all."""
    cost: CostModel = field(default_factory=CostModel)
    internal: InternalRequests | None = None
    """Requests to ourselves; None where nobody would send them."""

    def withdraw(self, digest: str, cause: str) -> None:
        """Take a mapper out of service: the policy changes, and its rows are never met again.

        cause: one word (`retired`, `removed`, `shadow`).
        """
        gone = [c for c in self.candidates if c.digest == digest]
        self.candidates = tuple(c for c in self.candidates if c.digest != digest)
        for candidate in gone:
            candidate.mapper.let_go()
            self.metrics.withdrawn(digest, candidate.source.name, candidate.draft, cause)
            logger.error("kvhub does not use mapper %s any more: %s", digest[:12], cause)

    @cached_property
    def stager(self) -> Stager:
        """Reads blocks for waiting requests."""
        settings = self.settings
        return Stager(
            self.metrics,
            self.cost,
            threads=settings.stage_threads,
            most_bytes=settings.stage_max_bytes,
            wait_seconds=settings.stage_wait_ms / 1e3,
        )

    @cached_property
    def publisher(self) -> Publisher:
        """Writes finished blocks."""
        return Publisher(
            self.exchange,
            self.metrics,
            most_bytes=self.settings.publish_max_bytes,
            wait_seconds=self.settings.publish_wait_ms / 1e3,
        )

    @cached_property
    def digest(self) -> str:
        """Identity of the served model."""
        return self.identity.digest

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.identity, self.heads)


def layout_of(identity: ModelIdentity, heads: int | None = None) -> Layout:
    """The block layout of a model's cache, of `heads` of its KV heads (None: of all)."""
    geometry = identity.geometry
    return Layout(
        num_layers=geometry.num_layers,
        num_kv_heads=heads or geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        dtype=identity.dtype,
    )
