"""RoPE parameters as somebody wrote them: which must be there, which may, and of what kind.

Checked on `config.json` itself before transformers reads it, whose own complaints name neither the value
nor what to write, and again on what transformers made of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvhub.errors import BadInput, Incompatible
from kvhub.model.rope_variants import LISTS, NOTES, SWITCHES, VARIANTS, WHOLE, Value, Variant
from kvhub.strict_json import shown

CORRECT = "write what the model was trained with into its config.json, or fetch the model again"
_KNOWN = {key for variant in VARIANTS.values() for key in (*variant.required, *variant.optional)}
_LARGEST = 1e300
"""Beyond it the formulas leave float64."""


def demand_rope(raw: Mapping[str, Any], *, model_type: str, partial: bool) -> None:
    """Check the RoPE of a `config.json` (`raw`), in transformers 5's spelling or an older one.

    Errors: those of `described`, `Incompatible(code="rope_theta")` where no theta is named, and
    `BadInput` where the parameters are no JSON object.
    """
    given = _written(raw)
    _refuse_layers(given)
    if "rope_theta" not in given:
        raise Incompatible(
            "config.json does not name rope_theta",
            "add the theta that the model was trained with to config.json",
            code="rope_theta",
        )
    described(given, model_type=model_type, partial=partial)


@contextmanager
def named(where: str) -> Iterator[None]:
    """Put `where`, the model, before the message of an error on the way."""
    try:
        yield
    except (BadInput, Incompatible) as error:
        if where:
            error.message = f"{where}: {error.message}"
        raise


def _written(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in one place, as transformers gathers them: the nested ones win."""
    given: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        nested = raw.get(key)
        if nested is not None and not isinstance(nested, dict):
            what = f"{key} in config.json must be an object of parameters, got {_got(nested)}"
            raise BadInput(what, CORRECT)
        given = given or dict(nested or {})
    kind = given.get("rope_type", given.get("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in raw:
            given.setdefault(key, raw[key])
    variant = VARIANTS.get(kind) if isinstance(kind, str) else None
    length = "original_max_position_embeddings"
    if variant is not None and given.get(length, raw.get(length)) != raw.get(length, given.get(length)):
        here, within = _got(raw[length]), _got(given[length])
        raise BadInput(f"{length} in config.json is {here}, and {within} within its RoPE parameters", CORRECT)
    if variant is not None and length in variant.required and length not in given:
        # transformers takes the other length, which is checked with the numbers of the geometry.
        given[length] = raw.get(length, 1)
    return given | {"rope_type": kind}


def described(
    given: Mapping[str, Any], *, model_type: str, partial: bool
) -> tuple[dict[str, Value], Variant]:
    """The parameters that define the angles, in one spelling, and their variant.

    partial: whether the model's class may turn only the first part of a head.
    Errors: `Incompatible` with code `rope_<type>`, `rope_partial`, `rope_per_layer` or `rope_unknown`;
    `BadInput` for what is missing or of the wrong kind.
    """
    given = dict(given)
    kind = given.pop("rope_type", None) or given.pop("type", None)
    given.pop("type", None)
    if any(key.startswith("mrope") for key in given):
        kind = "mrope"
    _refuse_layers(given)
    if not isinstance(kind, str):
        raise BadInput(f"RoPE parameter 'rope_type' must be a name, got {_got(kind)}", _known_types())
    variant = VARIANTS.get(kind)
    if variant is None:
        raise Incompatible(
            f"RoPE of type {shown(kind, 64)!r} is not supported",
            _known_types(),
            code="rope_" + re.sub(r"[^a-z0-9_]", "_", kind[:32].lower()),  # codes are metric labels
        )
    given = {
        key: value
        for key, value in given.items()
        if key not in NOTES
        and variant.neutral.get(key) != value
        and (value is not None or key in variant.required)
    }
    turned = _partial(given.pop("partial_rotary_factor", 1.0), model_type, partial)
    takes = f"{kind!r} takes {', '.join(variant.required)}"
    takes += f" and may take {', '.join(variant.optional)}" if variant.optional else ""
    if unknown := set(given) - {*variant.required, *variant.optional}:
        raise Incompatible(
            f"RoPE parameter {shown(min(unknown), 64)!r} is not known for {kind!r}",
            takes,
            code="rope_unknown",
        )
    if missing := [key for key in variant.required if given.get(key) is None]:
        raise BadInput(f"RoPE of type {kind!r} needs {missing[0]!r}", f"{takes}; {CORRECT}")
    known = (key for key in (*variant.required, *variant.optional) if key in given)
    return {key: _value(key, given[key]) for key in known} | turned, variant


def _refuse_layers(given: Mapping[str, Any]) -> None:
    """Parameters by kind of layer (`{"full_attention": {...}, ...}`) instead of parameters."""
    if any(isinstance(value, dict) and key not in _KNOWN for key, value in given.items()):
        raise Incompatible(
            "a RoPE that differs by layer is not supported",
            "kvhub maps models with one RoPE for all layers",
            code="rope_per_layer",
        )


def _known_types() -> str:
    return f"supported: {', '.join(sorted(VARIANTS))}"


def _partial(factor: Any, model_type: str, partial: bool) -> dict[str, Value]:
    factor = _number("partial_rotary_factor", 1.0 if factor is None else factor)
    if factor > 1:
        raise BadInput(f"RoPE parameter 'partial_rotary_factor' must be at most 1, got {factor}", CORRECT)
    if factor == 1:
        return {}
    if not partial:
        raise Incompatible(
            f"partial RoPE is not supported for model type {model_type!r}",
            "its class turns whole heads",
            code="rope_partial",
        )
    return {"partial_rotary_factor": factor}


def _value(key: str, value: Any) -> Value:
    if key in SWITCHES:
        if not isinstance(value, bool):
            raise BadInput(f"RoPE parameter {key!r} must be true or false, got {_got(value)}", CORRECT)
        return value
    if key in LISTS:
        if not isinstance(value, list | tuple):
            raise BadInput(f"RoPE parameter {key!r} must be a list of numbers, got {_got(value)}", CORRECT)
        return [_number(key, item) for item in value]
    number = _number(key, value)
    if key not in WHOLE:
        return number
    if number != int(number):
        raise BadInput(f"RoPE parameter {key!r} must be a whole number, got {_got(value)}", CORRECT)
    return int(number)


def _number(key: str, value: Any) -> float:
    # One spelling for the identity: 1000000 and 1000000.0 are the same theta.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
        raise BadInput(f"RoPE parameter {key!r} must be a positive number, got {_got(value)}", CORRECT)
    return float(value)


def _got(value: Any) -> str:
    text = shown(str(value)[:200], 64)
    return repr(text) if isinstance(value, str) else text
