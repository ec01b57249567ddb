"""The complete RoPE description of a model, from its config or its live rotary module."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor

from kvhub.errors import BadInput, Incompatible
from kvhub.model.config import ARCHITECTURES
from kvhub.model.identity import RopeSpec
from kvhub.strict_json import first_fault, shown
from kvhub_kernels.rotary import RotaryTable


class Variant(NamedTuple):
    """One kind of RoPE: what its description must hold and how its frequencies are computed.

    `frequencies(config, head_dim)` returns inverse frequencies `[rotary_dim / 2]` float32 in
    radians a token, and the attention factor, with the very operations transformers uses.
    """

    parameters: tuple[str, ...]
    frequencies: Callable[[Any, int], tuple[Tensor, float]]


def _default(config: Any, head_dim: int) -> tuple[Tensor, float]:
    theta = config.rope_parameters["rope_theta"]
    return 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)), 1.0


def _by_transformers(config: Any, head_dim: int) -> tuple[Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](
        config, torch.device("cpu")
    )
    return frequencies, float(factor)


VARIANTS = {
    "default": Variant(("rope_theta",), _default),
    "llama3": Variant(
        (
            "rope_theta",
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        _by_transformers,
    ),
}
"""By `rope_type`; the angles of each depend on nothing but the position."""


def rope_spec(config: Any) -> RopeSpec:
    """RoPE of a transformers config (`rope_parameters`, standardised from older spellings).

    Errors: `Incompatible(code="rope_<type>")` for a kind that is not supported, `BadInput` for
    missing or impossible numbers.
    """
    parameters, variant = _described(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    try:
        frequencies, factor = variant.frequencies(config, head_dim)
    except (TypeError, KeyError, ArithmeticError, RuntimeError) as error:
        raise BadInput(f"the RoPE parameters cannot be used: {shown(error)}") from None
    return _spec(config, parameters, frequencies, factor)


def rope_spec_from_module(module: Any) -> RopeSpec:
    """RoPE of a live rotary module of transformers (`model.model.rotary_emb`).

    The frequencies are the ones the module will use, whatever its config says.
    """
    parameters, _ = _described(module.config)
    frequencies = module.inv_freq.detach().to("cpu", torch.float32)
    return _spec(module.config, parameters, frequencies, float(module.attention_scaling))


def same_angles(one: RopeSpec, other: RopeSpec, *, tolerance: float = 1e-6) -> bool:
    """Whether two descriptions turn by the same angles, to `tolerance` relative in each frequency.

    1e-6 is a few ulp of float32: the same formula may differ in the last bit between machines.
    """
    if (one.rotary_dim, one.pairing) != (other.rotary_dim, other.pairing):
        return False
    pairs = zip(one.inverse_frequencies, other.inverse_frequencies, strict=True)
    close = all(abs(a - b) <= tolerance * max(abs(a), abs(b)) for a, b in pairs)
    return close and abs(one.attention_factor - other.attention_factor) <= tolerance * one.attention_factor


def rotary_table(rope: RopeSpec, positions: Tensor) -> RotaryTable:
    """cos and sin of `rope` at `positions` (`[tokens]` int64), on their device."""
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32, device=positions.device)
    return RotaryTable.build(frequencies, positions, pairing=rope.pairing, scale=rope.attention_factor)


def _described(config: Any) -> tuple[dict[str, float | int], Variant]:
    """The parameters that define the angles, in one spelling, and their variant."""
    given = dict(getattr(config, "rope_parameters", None) or {})
    kind = str(given.pop("rope_type", None) or given.pop("type", None))
    given.pop("type", None)
    if any(key.startswith("mrope") for key in given):
        kind = "mrope"
    if any(isinstance(value, dict) for value in given.values()):
        raise Incompatible("a RoPE that differs by layer is not supported", code="rope_per_layer")
    if (given.pop("partial_rotary_factor", None) or 1.0) != 1.0:
        raise Incompatible("partial RoPE is not supported", code="rope_partial")
    variant = VARIANTS.get(kind)
    if variant is None:
        raise Incompatible(
            f"RoPE of type {kind[:64]!r} is not supported",
            f"supported: {', '.join(sorted(VARIANTS))}",
            code="rope_" + re.sub(r"[^a-z0-9_]", "_", kind[:32].lower()),  # codes are metric labels
        )
    given = {key: value for key, value in given.items() if value is not None}
    if unknown := set(given) - set(variant.parameters):
        raise Incompatible(f"RoPE parameter {min(unknown)!r} is not known for {kind!r}", code="rope_unknown")
    if missing := set(variant.parameters) - set(given):
        raise BadInput(f"RoPE of type {kind!r} needs {min(missing)!r}")
    return {key: _number(key, given[key]) for key in variant.parameters}, variant


def _number(key: str, value: Any) -> float | int:
    # One spelling for the identity: 1000000 and 1000000.0 are the same theta.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise BadInput(f"RoPE parameter {key!r} must be a positive number, got {str(value)[:64]!r}")
    return int(value) if key == "original_max_position_embeddings" else float(value)


def _spec(config: Any, parameters: dict[str, float | int], frequencies: Tensor, factor: float) -> RopeSpec:
    pairing: Literal["half", "interleaved"] = ARCHITECTURES[config.model_type].pairing
    try:
        return RopeSpec(
            rope_type=config.rope_parameters["rope_type"],
            rotary_dim=2 * frequencies.numel(),
            pairing=pairing,
            attention_factor=factor,
            inverse_frequencies=frequencies.tolist(),
            parameters=dict(parameters),
            max_position=config.max_position_embeddings,
        )
    except ValidationError as error:
        raise BadInput(f"the RoPE parameters cannot be used: {first_fault(error)}") from None
