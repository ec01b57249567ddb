"""Where SGLang's rotary embedding is known to differ from transformers' for one description.

Says so before a server is started (`kvhub check`); the server itself compares the engine's live table
with the description and takes nobody's word (docs/rope.md has the list with its sources).
"""

from __future__ import annotations

import math

from kvhub.model.identity import RopeSpec

_TRANSFORMERS_ONLY = frozenset({"GlmForCausalLM"})


def not_served(architecture: str) -> str | None:
    """Why SGLang has no rotary table to compare for a model of this class, or None."""
    if architecture in _TRANSFORMERS_ONLY:
        return f"it has no class of its own for {architecture}"
    return None


def served_otherwise(rope: RopeSpec) -> str | None:
    """Why SGLang turns keys by other angles than `rope`, or None where it does not."""
    given = rope.parameters
    if rope.rope_type == "dynamic" and given.get("factor") != 1:
        return "SGLang scales dynamic NTK for its longest sequence at every length"
    if rope.rope_type == "longrope":
        return "SGLang chooses LongRoPE's factors by the longest request of a batch"
    if rope.rope_type == "yarn" and not math.isclose(_yarn_scale(rope), rope.attention_factor, rel_tol=1e-4):
        return f"SGLang does not read YaRN's attention_factor ({rope.attention_factor:g})"
    return None


def _yarn_scale(rope: RopeSpec) -> float:
    """SGLang's factor on cos and sin; its formula is transformers' without `attention_factor`."""
    factor, one, all_dim = (rope.parameters.get(key) for key in ("factor", "mscale", "mscale_all_dim"))
    if isinstance(one, float) and isinstance(all_dim, float):
        return _mscale(factor, one) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: object, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if isinstance(factor, float) and factor > 1 else 1.0
