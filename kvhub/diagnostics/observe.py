"""What the diagnostics need of one window: both models' rows and the target's own queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvhub.errors import BadInput
from kvhub.evaluation.inject import KvRows, run
from kvhub.evaluation.probe import QueryProbe
from kvhub.model.identity import RopeSpec
from kvhub.model.placement import input_device

if TYPE_CHECKING:
    from kvhub.model.load import LoadedModel


@dataclass(frozen=True)
class Observation:
    """One window `[prefix + tail]`, run natively by both models. Nothing here depends on a mapper."""

    source: KvRows
    """The source's rows of the prefix, as it caches them."""
    native: KvRows
    """The target's own rows of prefix and tail."""
    split: int
    """Length of the prefix."""
    queries: tuple[Tensor, ...]
    """The target's queries at the `n` tail positions, after q_norm and RoPE: `[heads, n, head_dim]`."""
    scaling: tuple[float, ...]
    """The factor on q.k, by layer."""
    residual: tuple[Tensor, ...]
    """What enters each layer at the tail positions: `[n, hidden]`."""
    outputs: tuple[Tensor, ...]
    """Each layer's output projection W_O `[hidden, heads * head_dim]`: the model's own, not copies."""
    rope: RopeSpec
    """The target's rotation."""

    @property
    def prefix(self) -> KvRows:
        """The target's own rows of the prefix."""
        return KvRows(
            tuple(key[: self.split] for key in self.native.keys),
            tuple(value[: self.split] for value in self.native.values),
        )


def observe(source: LoadedModel, target: LoadedModel, window: Tensor, tail: int) -> Observation:
    """Run both models over `window` (`[tokens]` int64); its last `tail` tokens are the tail.

    As in an evaluation the very last token is a label only, so there are `n = tail - 1` queries.
    Errors: `Corrupt` where rows are not finite; `BadInput` where accelerate keeps weights elsewhere.
    """
    split, count = len(window) - tail, tail - 1
    rows = KvRows.of(run(source.model, window[:split], keep=1)[1], split)
    rows.check_finite("the source's cache")
    model: Any = target.model
    outputs = tuple(layer.self_attn.o_proj.weight for layer in model.base_model.layers)
    if any(weight.is_meta for weight in outputs):
        raise BadInput(
            f"the weights of {target.identity.name} are not all in memory, and a diagnosis reads them",
            "use a machine or a GPU that holds the target, or --device cpu",
        )
    with QueryProbe(model, count) as probe, torch.inference_mode():
        found = model.base_model(
            input_ids=window[None, :-1].to(input_device(model)), use_cache=True, output_hidden_states=True
        )
    native = KvRows.of(found.past_key_values, len(window) - 1)
    native.check_finite("the target's own cache")
    layers = range(len(native.keys))
    return Observation(
        source=rows,
        native=native,
        split=split,
        queries=tuple(probe.queries[layer] for layer in layers),
        scaling=tuple(probe.scaling[layer] for layer in layers),
        residual=tuple(found.hidden_states[layer][0, -count:] for layer in layers),
        outputs=outputs,
        rope=target.identity.rope,
    )
