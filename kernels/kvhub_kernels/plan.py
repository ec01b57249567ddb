"""The shapes of a mapper: which source rows meet which matrix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Support = Literal["full", "head-local"]


@dataclass(frozen=True)
class Plan:
    """`source_layers[t]`: the source layers that target layer t reads, ascending and equally many.

    Both supports are one grouped product: a target layer has `groups` matrices
    `[depth, columns]`; group g reads `width` features of every selected layer. `full` is one
    group over all heads; `head-local` is one group a head, head g reading head g.
    """

    support: Support
    source_layers: tuple[tuple[int, ...], ...]
    source_heads: int
    source_dim: int
    target_heads: int
    target_dim: int

    def __post_init__(self) -> None:
        if self.support == "head-local" and self.source_heads != self.target_heads:
            raise ValueError("head-local support needs as many source heads as target heads")
        if not self.source_layers or len({len(chosen) for chosen in self.source_layers}) != 1:
            raise ValueError("every target layer must read the same number of source layers")
        if not all(self.source_layers) or any(
            layer < 0 or list(chosen) != sorted(set(chosen))
            for chosen in self.source_layers
            for layer in chosen
        ):
            raise ValueError("source layers must be ascending, distinct and not negative")
        if min(self.source_heads, self.source_dim, self.target_heads, self.target_dim) < 1:
            raise ValueError("heads and head sizes must be positive")

    @property
    def layers(self) -> int:
        """Target layers."""
        return len(self.source_layers)

    @property
    def k(self) -> int:
        """Source layers that one target layer reads."""
        return len(self.source_layers[0])

    @property
    def groups(self) -> int:
        """Matrices of one side of one target layer."""
        return 1 if self.support == "full" else self.target_heads

    @property
    def width(self) -> int:
        """Features of one source layer that one group reads."""
        return self.source_heads * self.source_dim // self.groups

    @property
    def depth(self) -> int:
        """Rows of one matrix; ordered by selected layer, head, dimension."""
        return self.k * self.width

    @property
    def columns(self) -> int:
        """Columns of one matrix; ordered by head, dimension."""
        return self.target_heads * self.target_dim // self.groups

    @cached_property
    def used(self) -> tuple[int, ...]:
        """Every source layer that any target layer reads, ascending."""
        return tuple(sorted({layer for chosen in self.source_layers for layer in chosen}))

    def flops(self, tokens: int, layers: int | None = None) -> int:
        """Multiplications and additions of the products, keys and values, all or `layers` target layers."""
        count = self.layers if layers is None else layers
        return 2 * 2 * tokens * count * self.groups * self.depth * self.columns
