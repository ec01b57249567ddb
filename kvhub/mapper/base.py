"""The one interface through which a mapper is applied: `map_layer`.

The reference path (transformers), the evaluation and the serving extension all
go through it; a family of mapper is a subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvhub.model.rope import rotary_table
from kvhub_kernels.rotary import strip_rope

if TYPE_CHECKING:
    from kvhub.artifact.manifest import Manifest
    from kvhub.model.identity import RopeSpec


class SourceRows:
    """The source model's cached rows for one span of tokens.

    keys, values: one tensor per source layer, `[tokens, num_kv_heads, head_dim]`,
    as the model caches them (keys after k_norm and after RoPE).
    positions: `[tokens]` int64, the true positions of the rows.

    Content keys are computed once per layer, however many target layers use it.
    """

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], positions: Tensor, rope: RopeSpec
    ) -> None:
        self._keys = keys
        self._values = values
        self.positions = positions
        self._table = rotary_table(rope, positions.to(keys[0].device))
        self._content: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return int(self.positions.shape[0])

    def content_keys(self, layer: int) -> Tensor:
        """Keys of `layer` with RoPE removed, `[tokens, num_kv_heads, head_dim]`."""
        if layer not in self._content:
            self._content[layer] = strip_rope(self._keys[layer], self._table)
        return self._content[layer]

    def values(self, layer: int) -> Tensor:
        """Values of `layer`, `[tokens, num_kv_heads, head_dim]`."""
        return self._values[layer]


class Mapper(ABC):
    """A fitted, directed mapper `source -> target`.

    Immutable once loaded; safe to share between threads.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    @abstractmethod
    def map_layer(self, target_layer: int, source: SourceRows) -> tuple[Tensor, Tensor]:
        """The target's cached rows of one layer, from the source's.

        Returns keys (RoPE of the target applied, at `source.positions`) and
        values, each `[tokens, num_kv_heads, head_dim]` of the target, in the
        mapper's compute dtype.
        """

    @abstractmethod
    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Mapper:
        """A copy of this mapper on `device` computing in `dtype`."""

    @classmethod
    def from_pretrained(cls, path_or_repo: str | Path, *, revision: str | None = None) -> Mapper:
        """Load from an artifact directory, or pull `org/name` from the Hub first.

        Every file is checked against the manifest. Errors: `NotFound`,
        `Corrupt`, `AccessDenied`, `Unreachable`.
        """
        from kvhub.mapper.load import load_mapper

        return load_mapper(path_or_repo, revision=revision)
