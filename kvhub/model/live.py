"""Compare a loaded transformers model with what its files say of it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from kvhub.errors import Incompatible
from kvhub.model.identity import Geometry, RopeSpec
from kvhub.model.rope import rope_spec_from_module, rotary_table, same_angles
from kvhub_kernels.rotary import apply_rope

_FAR = (0, 1, 7, 63, 1000, 4095, 8191, 32767)


def check_live(model: Any, shape: Geometry, rope: RopeSpec, dtype: str) -> None:
    """Refuse a loaded `model` whose dtype, cache or rotation is not the described one.

    Errors: `Incompatible` with code `dtype`, `geometry` or `rope_live`.
    """
    if (found := str(model.dtype).removeprefix("torch.")) != dtype:
        raise Incompatible(f"the model was loaded in {found}, not {dtype}", code="dtype")
    rotary = model.model.rotary_emb
    layers = model.model.layers
    if not same_angles(rope, rope_spec_from_module(rotary)):
        # Casting a whole model to bfloat16 by hand also rounds its rotary frequencies.
        raise Incompatible(
            "the loaded model's RoPE differs from its config",
            "load it with from_pretrained(dtype=...) and do not cast it afterwards",
            code="rope_live",
        )
    if len(layers) != shape.num_layers:
        raise Incompatible(
            f"the loaded model has {len(layers)} layers, not {shape.num_layers}", code="geometry"
        )
    for layer in layers:
        _check_layer(layer.self_attn, shape)
    _check_rotation(rotary, type(layers[0].self_attn).__module__, shape, rope)


def _check_layer(attention: Any, shape: Geometry) -> None:
    fused = getattr(attention, "qkv_proj", None)
    if fused is not None:
        width = fused.out_features - shape.num_attention_heads * shape.head_dim
        expected = 2 * shape.features
    else:
        width, expected = attention.k_proj.out_features, shape.features
    if attention.head_dim != shape.head_dim or width != expected:
        raise Incompatible("the loaded model's KV cache differs from its config", code="geometry")
    if hasattr(attention, "k_norm") != shape.k_norm:
        raise Incompatible("the loaded model's k_norm differs from its weights", code="geometry")


def probe_positions(rope: RopeSpec, end: int | None = None) -> list[int]:
    """Positions at which two rotations are compared: near, far, and on both sides of every length
    that the description names; below `end` and below `rope.limit`."""
    original = rope.parameters.get("original_max_position_embeddings")
    named = [rope.max_position, *([original] if isinstance(original, int) else [])]
    around = (position for length in named for position in (length - 1, length, length + 1, 2 * length - 1))
    stop = min(bound for bound in (end, rope.limit, 1 << 22) if bound is not None)
    return sorted({position for position in (*_FAR, *around) if 0 <= position < stop})


def _check_rotation(rotary: Any, module: str, shape: Geometry, rope: RopeSpec) -> None:
    """Rotate by the model's own code and by ours: pairing, width, angles and scale in one comparison."""
    rotate = getattr(sys.modules.get(module), "apply_rotary_pos_emb", None)
    if rotate is None:
        raise Incompatible(f"{module} has no apply_rotary_pos_emb to compare with", code="rope_live")
    device = rotary.inv_freq.device
    positions = torch.tensor(probe_positions(rope), device=device)
    # No two dimensions are alike, so that no wrong pairing passes.
    generator = torch.Generator().manual_seed(0)
    content = 2 * torch.rand(len(positions), 1, shape.head_dim, generator=generator).to(device) - 1
    with torch.no_grad():
        cos, sin = rotary(content, positions[None])
        heads = content.transpose(0, 1)[None]
        found = rotate(heads, heads, cos, sin)[1][0].transpose(0, 1)
    error = (found - apply_rope(content, rotary_table(rope, positions))).abs().amax(dim=(1, 2))
    # float32: a frequency that is off in its last bit turns by 1e-7 of the position.
    allowed = rope.attention_factor * (1e-4 + 2e-7 * positions)
    if not bool((error <= allowed).all()):
        worst = int((error - allowed).argmax())
        raise Incompatible(
            f"the loaded model rotates keys otherwise than its config says: {float(error[worst]):.3g} off"
            f" at position {int(positions[worst])}",
            code="rope_live",
        )
