"""The frozen target on a mapped cache, with gradients into the maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvhub.evaluation.inject import KvRows
from kvhub.fit.distill.correction import Correction
from kvhub.fit.distill.likely import KEPT, Likely
from kvhub.fit.side import Side
from kvhub.model.placement import input_device
from kvhub.model.rope import rotary_table
from kvhub_kernels.normalise import normalise
from kvhub_kernels.rotary import apply_rope

Corrections = Sequence[tuple[Correction, Correction]]
"""(K, V) of every target layer."""


@dataclass
class Through:
    """One pair, as the objective sees it. model: the target, without gradients of its own."""

    model: Any
    source: Side
    target: Side
    layers: Sequence[Sequence[int]]
    """Selected source layers of every target layer."""
    exact_prefix: int
    norms: Sequence[Tensor | None] = ()
    """Of every target layer the weight of k_norm that its keys go through; empty or None: they do not."""
    kept: int = KEPT
    """Most likely tokens that the divergence tells apart."""
    _known: dict[tuple[bytes, int, int], Likely] = field(default_factory=dict)

    def loss(self, corrections: Corrections, window: Tensor, split: int, tail: int) -> Tensor:
        """KL over the `tail` tokens of `window` (`[tokens]`) from `split` on, the rows before them mapped."""
        wanted = self.likely(window, split, tail)
        rows = self._mapped(corrections, window, split)
        return wanted.divergence(self._read(rows, window, split, tail))

    def likely(self, window: Tensor, split: int, tail: int) -> Likely:
        """What the target expects there on its own cache; computed once."""
        key = window.numpy().tobytes(), split, tail
        if key not in self._known:
            own = self.target.capture(window)
            rows = KvRows(tuple(k[:split] for k in own.keys), tuple(v[:split] for v in own.values))
            with torch.no_grad():
                logits = self._read(rows, window, split, tail)
                self._known[key] = Likely.of(logits, self.kept)
        return self._known[key]

    def _read(self, rows: KvRows, window: Tensor, split: int, tail: int) -> Tensor:
        """Logits `[tail, vocabulary]`."""
        device = input_device(self.model)
        out = self.model(
            input_ids=window[None, split : split + tail].to(device),
            position_ids=torch.arange(split, split + tail, device=device)[None],
            past_key_values=rows.to_cache(self.model),
            use_cache=True,
        )
        logits: Tensor = out.logits[0]
        return logits

    def _mapped(self, corrections: Corrections, window: Tensor, split: int) -> KvRows:
        """The target's rows before `split`, `[split, H_t, D_t]`; the exact prefix is its own."""
        skip, rope = self.exact_prefix, self.target.identity.rope
        home = input_device(self.model)
        source = self.source.capture(window)
        own = self.target.capture(window) if skip else None
        table = rotary_table(rope, torch.arange(skip, split, device=home))
        heads = self.target.identity.geometry.num_kv_heads
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for number, (chosen, pair) in enumerate(zip(self.layers, corrections, strict=True)):
            key, value = (
                correction(torch.stack([rows[layer][skip:split].to(home) for layer in chosen], dim=1)).view(
                    split - skip, heads, -1
                )
                for correction, rows in zip(pair, (source.content_keys, source.values), strict=True)
            )
            norm = self.norms[number] if self.norms else None
            if norm is not None:
                key = normalise(key, norm.to(home))
            key = apply_rope(key, table).to(self.model.dtype)
            value = value.to(self.model.dtype)
            if own is not None:
                key = torch.cat((own.keys[number][:skip].to(key), key))
                value = torch.cat((own.values[number][:skip].to(value), value))
            keys.append(key)
            values.append(value)
        return KvRows(tuple(keys), tuple(values))


def split_of(length: int, tail: int, place: int, places: int, exact_prefix: int) -> int:
    """Where a tail begins: one of `places`, evenly from a quarter of the window to its last `tail` tokens."""
    last = length - tail
    first = max(exact_prefix + 1, min(length // 4, last))
    return first + (last - first) * (place + 1) // places
