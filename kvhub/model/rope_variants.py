"""The kinds of RoPE that kvhub knows, one small entry each.

An entry says what the description of its kind must and may hold and how the inverse frequencies are
computed: with transformers' own functions, so that they are a live model's to the last bit.
What each does and where the engines differ: docs/rope.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvhub.errors import BadInput

Value = float | int | bool | list[float]


def head_dim(config: Any) -> int:
    """The width of a head: the explicit `head_dim` where there is one."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rotary_dim(config: Any) -> int:
    """The rotated dimensions of a head, the first of them; an odd number is rounded up to a pair."""
    width = int(head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))
    return width + width % 2


def _default(config: Any) -> tuple[Tensor, float]:
    theta = config.rope_parameters["rope_theta"]
    # Each model class of transformers has this formula of its own; there is no shared function to call.
    width = int(head_dim(config) * config.rope_parameters.get("partial_rotary_factor", 1.0))
    return 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)), 1.0


def _by_transformers(config: Any) -> tuple[Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](
        config, torch.device("cpu")
    )
    return frequencies, float(factor)


def _nothing(config: Any, values: Mapping[str, Value]) -> None:
    return


def _bands(config: Any, values: Mapping[str, Value]) -> None:
    if not values["low_freq_factor"] < values["high_freq_factor"]:  # type: ignore[operator]
        raise BadInput(
            "RoPE parameter 'low_freq_factor' must be below 'high_freq_factor'",
            f"it is {values['low_freq_factor']}, that is {values['high_freq_factor']}",
        )


def _factor_lists(config: Any, values: Mapping[str, Value]) -> None:
    pairs = rotary_dim(config) // 2
    for key in ("short_factor", "long_factor"):
        found = values[key]
        if not isinstance(found, list) or len(found) != pairs:
            raise BadInput(
                f"RoPE parameter {key!r} must list {pairs} numbers, one a rotated pair",
                f"it lists {len(found) if isinstance(found, list) else 'none'}",
            )


class Variant(NamedTuple):
    """One kind of RoPE.

    `frequencies(config)` returns inverse frequencies `[rotary_dim / 2]` float32 in radians a token,
    and the attention factor (on cos and on sin). `check(config, parameters)` raises `BadInput`.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    frequencies: Callable[[Any], tuple[Tensor, float]] = _by_transformers
    check: Callable[[Any, Mapping[str, Value]], None] = _nothing
    neutral: Mapping[str, float] = MappingProxyType({})
    """Parameters that only some engines read, and the value at which they change nothing anywhere."""


VARIANTS = {
    "default": Variant(("rope_theta",), frequencies=_default),
    "linear": Variant(("rope_theta", "factor")),
    "dynamic": Variant(("rope_theta", "factor")),
    "llama3": Variant(
        (
            "rope_theta",
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        check=_bands,
    ),
    "yarn": Variant(
        ("rope_theta", "factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        neutral=MappingProxyType({"attn_factor": 1.0, "extrapolation_factor": 1.0}),
    ),
    "longrope": Variant(
        ("rope_theta", "short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
        check=_factor_lists,
    ),
}
"""By `rope_type`."""

LISTS = frozenset({"short_factor", "long_factor"})
SWITCHES = frozenset({"truncate"})
WHOLE = frozenset({"original_max_position_embeddings"})
NOTES = frozenset({"finetuned"})
"""Remarks in published configs that no engine reads."""
