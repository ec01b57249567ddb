"""Read the queries that a model's attention really uses, after q_norm and RoPE."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvhub.model.placement import input_device

_NAME = "kvhub_probe"


class QueryProbe:
    """While entered, `model` runs sdpa attention and the probe keeps each layer's last `keep` queries.

    `queries[layer]`: `[num_attention_heads, keep, head_dim]`; `scaling[layer]`: the factor on q.k.
    The model's own attention implementation is restored on exit.
    """

    def __init__(self, model: Any, keep: int) -> None:
        self._model = model
        self._keep = keep
        self.queries: dict[int, Tensor] = {}
        self.scaling: dict[int, float] = {}

    def __enter__(self) -> QueryProbe:
        self._before: str = self._model.config._attn_implementation
        AttentionInterface.register(_NAME, self._attend)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        self._model.set_attn_implementation(_NAME)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model.set_attn_implementation(self._before)

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        layer = int(module.layer_idx)
        self.queries[layer] = query[0, :, -self._keep :].clone().to(input_device(self._model))
        scaling = kwargs.get("scaling")
        self.scaling[layer] = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
        out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return out
