"""The complete RoPE description of a model, from its config or its live rotary module."""

from __future__ import annotations

from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor

from kvhub.errors import BadInput, Incompatible
from kvhub.model.config import ARCHITECTURES
from kvhub.model.identity import RopeSpec
from kvhub.model.rope_given import CORRECT, described, named
from kvhub.model.rope_variants import Value, Variant
from kvhub.strict_json import first_fault, shown
from kvhub_kernels.rotary import RotaryTable


def rope_spec(config: Any, where: str = "") -> RopeSpec:
    """RoPE of a transformers config (`rope_parameters`, standardised from older spellings).

    where: the model, for messages.
    Errors: `Incompatible` with code `rope_<type>`, `rope_partial`, `rope_per_layer` or `rope_unknown`
    for what is not supported, `BadInput` for missing or impossible numbers.
    """
    with named(where):
        parameters, variant = _described(config)
        try:
            variant.check(config, parameters)
            frequencies, factor = variant.frequencies(config)
        except (TypeError, KeyError, ArithmeticError, ValueError, RuntimeError) as error:
            raise BadInput(f"the RoPE parameters cannot be used: {shown(error)}", CORRECT) from None
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
    if (one.rotary_dim, one.pairing, one.limit) != (other.rotary_dim, other.pairing, other.limit):
        return False
    pairs = zip(one.inverse_frequencies, other.inverse_frequencies, strict=True)
    close = all(abs(a - b) <= tolerance * max(abs(a), abs(b)) for a, b in pairs)
    return close and abs(one.attention_factor - other.attention_factor) <= tolerance * one.attention_factor


def rotary_table(rope: RopeSpec, positions: Tensor) -> RotaryTable:
    """cos and sin of `rope` at `positions` (`[tokens]` int64), on their device.

    Errors: `Incompatible(code="rope_length")` for positions at which the angles of a cached key would
    depend on how long the sequence was when it was cached (`RopeSpec.limit`).
    """
    if rope.limit is not None and positions.numel() and int(positions.max()) >= rope.limit:
        raise Incompatible(
            f"{rope.rope_type} RoPE is exact below position {rope.limit}, not at {int(positions.max())}",
            "beyond it the angles of a cached key depend on the length of the sequence",
            code="rope_length",
        )
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32, device=positions.device)
    return RotaryTable.build(frequencies, positions, pairing=rope.pairing, scale=rope.attention_factor)


def _described(config: Any) -> tuple[dict[str, Value], Variant]:
    """The parameters that define the angles, in one spelling, and their variant."""
    kind = config.model_type
    return described(
        getattr(config, "rope_parameters", None) or {},
        model_type=kind,
        partial=ARCHITECTURES[kind].partial,
    )


def _spec(config: Any, parameters: dict[str, Value], frequencies: Tensor, factor: float) -> RopeSpec:
    try:
        return RopeSpec(
            rope_type=config.rope_parameters["rope_type"],
            rotary_dim=2 * frequencies.numel(),
            pairing=ARCHITECTURES[config.model_type].pairing,
            attention_factor=factor,
            inverse_frequencies=frequencies.tolist(),
            parameters=cast(Any, parameters),
            max_position=config.max_position_embeddings,
        )
    except ValidationError as error:
        raise BadInput(f"the RoPE parameters cannot be used: {first_fault(error)}", CORRECT) from None
