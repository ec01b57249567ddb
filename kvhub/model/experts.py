"""What the layers of a mixture of experts must have in the files, where each expert is apart."""

from __future__ import annotations

from typing import Any

from kvhub.errors import BadInput

MIXTURES = ("qwen3_moe",)
"""Model types whose layers differ, by `model_type`."""


def mlp_parts(config: Any, number: int, *, fused: bool, where: str) -> dict[str, tuple[int, ...]]:
    """Shapes of what layer `number` has for an MLP, as `mlp.experts.3.up_proj.weight`. config: transformers'.

    Every `decoder_sparse_step`-th layer that is not one of `mlp_only_layers` has experts. fused: the experts
    of a layer are one tensor, as they are in memory. Errors: `BadInput` naming `where`.
    """
    hidden, experts = config.hidden_size, config.num_experts
    if not 0 < config.num_experts_per_tok <= experts:
        raise BadInput(
            f"{where}: config.json asks {config.num_experts_per_tok} of {experts} experts a token",
            "write what the model was trained with, or fetch the model again",
        )
    if number in (config.mlp_only_layers or ()) or (number + 1) % config.decoder_sparse_step:
        return _of_one("mlp.", hidden, config.intermediate_size)
    width = config.moe_intermediate_size
    router: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts, hidden)}
    if fused:
        return router | {
            "mlp.experts.gate_up_proj": (experts, 2 * width, hidden),
            "mlp.experts.down_proj": (experts, hidden, width),
        }
    for expert in range(experts):
        router |= _of_one(f"mlp.experts.{expert}.", hidden, width)
    return router


def _of_one(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }
