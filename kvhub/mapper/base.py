"""The one interface through which a mapper is applied: `map_layer`.

The reference path (transformers), the evaluation and the serving extension all
go through it; a family of mapper is a subclass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvhub.model.rope import rotary_table
from kvhub_kernels.rotary import RotaryTable, strip_rope
from kvhub_kernels.rows import Rows

if TYPE_CHECKING:
    from transformers import DynamicCache

    from kvhub.artifact.manifest import Manifest
    from kvhub.model.identity import ModelIdentity, RopeSpec
    from kvhub.model.load import LoadedModel
    from kvhub_kernels.resident import Resident


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
        self._rope = rope
        self._tables: list[tuple[RopeSpec, RotaryTable]] = []
        self._content: dict[tuple[int, torch.dtype], Tensor] = {}

    def __len__(self) -> int:
        return int(self.positions.shape[0])

    @property
    def strip(self) -> RotaryTable:
        """The source's own rotation at these positions."""
        return self.table(self._rope)

    def rows(self) -> Rows:
        """The same rows, as the kernels read them."""
        return Rows(self._keys, self._values, len(self))

    def table(self, rope: RopeSpec) -> RotaryTable:
        """cos and sin of `rope` at these positions, computed once for all layers."""
        for known, table in self._tables:
            if known is rope:
                return table
        table = rotary_table(rope, self.positions.to(self._keys[0].device))
        self._tables.append((rope, table))
        return table

    def content_keys(self, layer: int, dtype: torch.dtype | None = None) -> Tensor:
        """Keys of `layer` with RoPE removed, `[tokens, num_kv_heads, head_dim]`.

        The rotation is computed in float32 and rounded once, to `dtype` (None: the keys' own).
        """
        keys = self._keys[layer]
        wanted = dtype or keys.dtype
        if (layer, wanted) not in self._content:
            precise = strip_rope(keys.to(torch.float32), self.table(self._rope))
            self._content[layer, wanted] = precise.to(wanted)
        return self._content[layer, wanted]

    def values(self, layer: int) -> Tensor:
        """Values of `layer`, `[tokens, num_kv_heads, head_dim]`."""
        return self._values[layer]


class Mapper(ABC):
    """A fitted, directed mapper `source -> target`.

    Immutable once loaded; safe to share between threads. On a GPU the kernels' scratch and result belong to
    the last call: there one stream maps with it at a time.
    """

    device: torch.device = torch.device("cpu")
    """Where `map_layer` computes."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest

    @abstractmethod
    def map_layer(self, target_layer: int, source: SourceRows) -> tuple[Tensor, Tensor]:
        """The target's cached rows of one layer, from the source's.

        Returns keys (RoPE of the target applied, at `source.positions`) and
        values, each `[tokens, num_kv_heads, head_dim]` of the target, in the
        mapper's compute dtype.
        """

    def map_rows(self, source: SourceRows, target: Rows) -> Tensor:
        """Write every target layer's rows into a cache, `target.keys[t]` and `target.values[t]`.

        Returns a 0-dimensional tensor, true if all of them are finite; where it is not, the rows are
        worthless. On a GPU it runs on the current stream and only reading the result waits for it.
        """
        slots = target.token_slots()
        where = slice(0, target.tokens) if slots is None else slots
        finite = torch.ones((), dtype=torch.bool, device=target.device)
        for layer, (keys, values) in enumerate(zip(target.keys, target.values, strict=True)):
            for pool, mapped in zip((keys, values), self.map_layer(layer, source), strict=True):
                stored = mapped.to(pool.device, pool.dtype)
                finite &= torch.isfinite(stored).all()
                pool[where] = stored
        return finite

    def map_blocks(self, blocks: Sequence[Tensor], positions: Tensor, target: Rows) -> Tensor:
        """`map_rows` for the source's rows as they come from an exchange, in pieces and in host memory.

        blocks: `[num_layers, 2, tokens, num_kv_heads, head_dim]` each, keys and values, in order;
        positions: `[tokens]` int64 of all of them, on the device of `target`.
        """
        rows = torch.cat(list(blocks), dim=2).to(target.device)
        source = SourceRows(
            list(rows[:, 0].unbind(0)), list(rows[:, 1].unbind(0)), positions, self.manifest.source.rope
        )
        return self.map_rows(source, target)

    def prepare(self, device: torch.device | str, dtype: torch.dtype) -> None:
        """Get ready to write into caches on `device` in `dtype`, before the first request needs it.

        From any thread, and again whenever it may have been dropped (`keep_in`).
        Errors: `ValueError` where `map_rows` cannot do that, or where it does not fit.
        """
        return

    def hold(self, device: torch.device | str, dtype: torch.dtype) -> object | None:
        """What `prepare` made, None if it has been dropped for other mappers since (`keep_in`).

        While the caller keeps it, `map_rows` and `map_blocks` into such caches build nothing.
        """
        return self

    def keep_in(self, resident: Resident) -> None:
        """What `prepare` makes is kept in `resident` from now on, and may be dropped for other mappers."""
        return

    def let_go(self) -> None:
        """Drop what `prepare` made, from `keep_in`'s budget too: the mapper is used no more."""
        return

    def engine(self, device: torch.device | str) -> str:
        """What `map_rows` computes with for caches on `device`, for a log."""
        return "torch, layer by layer"

    @abstractmethod
    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Mapper:
        """A copy of this mapper on `device` computing in `dtype`."""

    def map(
        self,
        source_cache: Any,
        *,
        source: LoadedModel | ModelIdentity,
        target: LoadedModel | ModelIdentity,
        native: Any = None,
        positions: Tensor | None = None,
    ) -> DynamicCache:
        """The target's cache for the tokens that `source_cache` holds, for use with transformers.

        source_cache: a transformers cache of the source, `[batch, num_kv_heads, tokens, head_dim]` per
            layer; batch 1, or several sequences of equal length without padding.
        source, target: the live pair; it must be the very one that the mapper was fitted on.
        native: a cache that the target itself computed for the first tokens; its rows replace the
            mapped ones. It must cover `manifest.exact_prefix` tokens where that is not 0.
        positions: `[tokens]` int64, default `arange(tokens)`.

        Returns a `DynamicCache` in the target's dtype, on the device of `source_cache`. The target must
        still run at least the last token of the prompt itself, so leave that one out.
        Errors: `Incompatible` with code `source_identity`, `target_identity` or `geometry`; `BadInput`
        for an empty cache, NaN or infinity, wrong positions or a missing exact prefix.
        """
        from kvhub.mapper.apply import map_cache

        return map_cache(self, source_cache, source, target, native, positions)

    @classmethod
    def from_pretrained(
        cls, path_or_repo: str | Path, *, revision: str | None = None, subfolder: str = ""
    ) -> Mapper:
        """Load from an artifact directory, or pull `org/name[/folder]` from the Hub first.

        Every file is checked against the manifest. Errors: `NotFound`,
        `Corrupt`, `AccessDenied`, `Unreachable`.
        """
        from kvhub.mapper.load import load_mapper

        return load_mapper(path_or_repo, revision=revision, subfolder=subfolder)
