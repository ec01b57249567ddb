"""What transformers builds from a config: one layer's weights by name and shape, without memory for them."""

from __future__ import annotations

import copy
from typing import Any

from kvhub.errors import BadInput
from kvhub.model.quiet import quietly
from kvhub.strict_json import shown


def layer_parts(config: Any, where: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of the first layer, as `self_attn.k_proj.weight`. config: transformers'.

    Errors: `BadInput` naming `where` if no model can be built from it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    one = copy.deepcopy(config)
    one.num_hidden_layers = 1
    if getattr(one, "layer_types", None):
        one.layer_types = one.layer_types[:1]
    try:
        with quietly(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(one, attn_implementation="sdpa")
    except Exception as error:  # each model's code raises its own kinds for numbers that do not fit
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(
            f"{where}: config.json cannot be used: {shown(reason)}", "correct it, or fetch the model again"
        ) from error
    return {name: tuple(weight.shape) for name, weight in model.model.layers[0].named_parameters()}
