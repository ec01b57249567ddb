"""Put a cache into a transformers model and run the tail natively on it.

The injection check comes before every comparison: the target's own cache,
taken out and put back, must reproduce its logits. Otherwise a difference
between arms could be the plumbing's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvhub.errors import Corrupt, Incompatible
from kvhub.model.placement import input_device, layer_device
from kvhub.model.tokenizer import demand_embedded

INJECTION_TOLERANCE = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.5}
"""Largest accepted |logit difference| per dtype of the model. On a CPU the two ways are equal bit for
bit; other kernels may round differently, in bfloat16 by a few steps of 0.125 at a logit of 30. Rows
misplaced by a single position, the smallest fault, move the logits of Qwen2.5-Coder by 0.6 to 1.2."""


@dataclass(frozen=True)
class KvRows:
    """Cached rows of one span, one `[tokens, num_kv_heads, head_dim]` tensor per layer."""

    keys: tuple[Tensor, ...]
    """After k_norm and RoPE, as the model caches them."""
    values: tuple[Tensor, ...]

    def __len__(self) -> int:
        return int(self.keys[0].shape[0])

    @classmethod
    def of(cls, cache: DynamicCache, stop: int) -> KvRows:
        """The first `stop` rows of a batch-1 cache (copied, so that the rest can be freed)."""
        keys, values = [], []
        home = cache.layers[0].keys.device  # a sharded model's layers lie on several devices
        for layer in cache.layers:
            keys.append(layer.keys[0, :, :stop].transpose(0, 1).contiguous().to(home))
            values.append(layer.values[0, :, :stop].transpose(0, 1).contiguous().to(home))
        return cls(tuple(keys), tuple(values))

    def with_exact_prefix(self, native: KvRows, count: int) -> KvRows:
        """These rows with the first `count` replaced by `native`'s."""
        if count == 0:
            return self
        return KvRows(
            tuple(
                torch.cat((n[:count].to(k.dtype), k[count:]))
                for n, k in zip(native.keys, self.keys, strict=True)
            ),
            tuple(
                torch.cat((n[:count].to(v.dtype), v[count:]))
                for n, v in zip(native.values, self.values, strict=True)
            ),
        )

    def check_finite(self, what: str) -> None:
        """Raise `Corrupt` when any row holds NaN or infinity."""
        for layer, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            if not (torch.isfinite(key).all() and torch.isfinite(value).all()):
                raise Corrupt(
                    f"{what} has a NaN or infinite row in layer {layer}",
                    "nothing was evaluated; fit the mapper again",
                )

    def to_cache(self, model: Any) -> DynamicCache:
        """A transformers cache holding these rows, in the model's dtype, each layer where it is computed."""
        cache = DynamicCache(config=model.config)
        if len(cache.layers) not in (0, len(self.keys)):
            raise Incompatible(
                f"the cache has {len(self.keys)} layers, the model {len(cache.layers)}", code="geometry"
            )
        for layer, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            device = layer_device(model, layer)
            cache.update(
                key.transpose(0, 1)[None].to(device, model.dtype),
                value.transpose(0, 1)[None].to(device, model.dtype),
                layer,
            )
        return cache


def run(
    model: Any, tokens: Tensor, *, start: int = 0, rows: KvRows | None = None, keep: int | None = None
) -> tuple[Tensor, DynamicCache]:
    """One forward of `tokens` (`[n]` int64) at positions `start ... start + n - 1` on a cache of `rows`.

    Returns float32 logits of the last `keep` tokens (default all), `[keep, vocabulary]`, and the cache.
    `rows` may be None with `start > 0`: the model then sees only `tokens`, at their true positions.
    Errors: `BadInput` if a token has no embedding.
    """
    demand_embedded(model, tokens)
    cache = DynamicCache(config=model.config) if rows is None else rows.to_cache(model)
    home = input_device(model)
    positions = torch.arange(start, start + len(tokens), device=home)[None]
    keep = len(tokens) if keep is None else keep
    with torch.inference_mode():
        out = model(
            input_ids=tokens[None].to(home),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
    return out.logits[0, -keep:].to(home, torch.float32), cache


def injection_error(native: Tensor, injected: Tensor) -> float:
    """Largest |difference| between logits of one pass and of the re-injected own cache."""
    return float((native - injected).abs().max())


def check_injection(errors: Sequence[float], dtype: str) -> float:
    """The largest of `errors`, or `Incompatible` when it is above the tolerance for `dtype`."""
    worst, limit = max(errors), INJECTION_TOLERANCE[dtype]
    if not worst <= limit:
        raise Incompatible(
            f"the target's own cache, re-injected, moves its logits by {worst:.3g} ({dtype} limit {limit:g})",
            "this model cannot be evaluated: it does not attend to an injected cache as to its own",
            code="injection",
        )
    return worst
