"""The complete RoPE description of a model, from its config or its live rotary module."""

from __future__ import annotations

import re
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor

from kvhub.errors import BadInput, Incompatible
from kvhub.model.config import ARCHITECTURES
from kvhub.model.identity import RopeSpec
from kvhub.model.rope_variants import LISTS, NOTES, SWITCHES, VARIANTS, WHOLE, Value, Variant
from kvhub.strict_json import first_fault, shown
from kvhub_kernels.rotary import RotaryTable


def rope_spec(config: Any) -> RopeSpec:
    """RoPE of a transformers config (`rope_parameters`, standardised from older spellings).

    Errors: `Incompatible` with code `rope_<type>`, `rope_partial`, `rope_per_layer` or `rope_unknown`
    for what is not supported, `BadInput` for missing or impossible numbers.
    """
    parameters, variant = _described(config)
    try:
        variant.check(config, parameters)
        frequencies, factor = variant.frequencies(config)
    except (TypeError, KeyError, ArithmeticError, ValueError, RuntimeError) as error:
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
    given = dict(getattr(config, "rope_parameters", None) or {})
    kind = str(given.pop("rope_type", None) or given.pop("type", None))
    given.pop("type", None)
    if any(key.startswith("mrope") for key in given):
        kind = "mrope"
    if any(isinstance(value, dict) for value in given.values()):
        raise Incompatible("a RoPE that differs by layer is not supported", code="rope_per_layer")
    variant = VARIANTS.get(kind)
    if variant is None:
        raise Incompatible(
            f"RoPE of type {kind[:64]!r} is not supported",
            f"supported: {', '.join(sorted(VARIANTS))}",
            code="rope_" + re.sub(r"[^a-z0-9_]", "_", kind[:32].lower()),  # codes are metric labels
        )
    given = {
        key: value
        for key, value in given.items()
        if value is not None and key not in NOTES and variant.neutral.get(key) != value
    }
    partial = _partial(config, given.pop("partial_rotary_factor", 1.0))
    if unknown := set(given) - {*variant.required, *variant.optional}:
        raise Incompatible(f"RoPE parameter {min(unknown)!r} is not known for {kind!r}", code="rope_unknown")
    if missing := set(variant.required) - set(given):
        raise BadInput(f"RoPE of type {kind!r} needs {min(missing)!r}")
    known = (key for key in (*variant.required, *variant.optional) if key in given)
    return {key: _value(key, given[key]) for key in known} | partial, variant


def _partial(config: Any, factor: Any) -> dict[str, Value]:
    factor = _number("partial_rotary_factor", factor)
    if factor > 1:
        raise BadInput(f"RoPE parameter 'partial_rotary_factor' must be at most 1, got {factor}")
    if factor == 1:
        return {}
    if not ARCHITECTURES[config.model_type].partial:
        raise Incompatible(
            f"partial RoPE is not supported for model type {config.model_type!r}", code="rope_partial"
        )
    return {"partial_rotary_factor": factor}


def _value(key: str, value: Any) -> Value:
    if key in SWITCHES:
        if not isinstance(value, bool):
            raise BadInput(f"RoPE parameter {key!r} must be true or false, got {str(value)[:64]!r}")
        return value
    if key in LISTS:
        if not isinstance(value, list | tuple):
            raise BadInput(f"RoPE parameter {key!r} must be a list of numbers, got {str(value)[:64]!r}")
        return [_number(key, item) for item in value]
    number = _number(key, value)
    return int(number) if key in WHOLE else number


def _number(key: str, value: Any) -> float:
    # One spelling for the identity: 1000000 and 1000000.0 are the same theta.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise BadInput(f"RoPE parameter {key!r} must be a positive number, got {str(value)[:64]!r}")
    return float(value)


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
        raise BadInput(f"the RoPE parameters cannot be used: {first_fault(error)}") from None
