"""Everything one server process knows for handoffs: identity, mappers, exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from kvhub.exchange import Exchange, Layout
from kvhub_sglang.namespace import Salts
from kvhub_sglang.report import Metrics
from kvhub_sglang.settings import ServingSettings

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

    @cached_property
    def source_digest(self) -> str:
        return self.source.digest

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.source)

    def named(self, names: frozenset[str]) -> bool:
        """Whether a request's list of sources names this one (name or digest)."""
        name = self.source.name.casefold()
        return bool({name, name.rsplit("/", 1)[-1], self.source_digest} & names)


@dataclass
class Serving:
    """Fixed at start."""

    settings: ServingSettings
    identity: ModelIdentity
    candidates: tuple[Candidate, ...]
    exchange: Exchange
    page_size: int
    metrics: Metrics
    salts: Salts = field(default_factory=Salts)
    stream: torch.Stream | None = None
    """The stream that forwards run on (CUDA); rows are placed in its order."""

    @cached_property
    def digest(self) -> str:
        """Identity of the served model."""
        return self.identity.digest

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.identity)


def layout_of(identity: ModelIdentity) -> Layout:
    """The block layout of a model's cache (one tensor-parallel rank)."""
    geometry = identity.geometry
    return Layout(
        num_layers=geometry.num_layers,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        dtype=identity.dtype,
    )
