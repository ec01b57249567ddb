"""The target's own forward over the same tokens, layer by layer, with random weights of its real shapes."""

from __future__ import annotations

import time
from typing import Any

import torch

TARGETS: dict[str, dict[str, Any]] = {
    "Qwen2.5-Coder 0.5B->1.5B": {"hidden": 1536, "inner": 8960, "heads": 12, "kv": 2, "layers": 28},
    "Qwen3 14B->32B": {"hidden": 5120, "inner": 25600, "heads": 64, "kv": 8, "layers": 64},
    "Qwen3 8B->32B": {"hidden": 5120, "inner": 25600, "heads": 64, "kv": 8, "layers": 64},
    "Llama 3.1 8B->70B": {"hidden": 8192, "inner": 28672, "heads": 64, "kv": 8, "layers": 80},
    "Ministral 3 3B->8B": {"hidden": 4096, "inner": 14336, "heads": 32, "kv": 8, "layers": 34},
    "Ministral 3 3B->14B": {"hidden": 5120, "inner": 16384, "heads": 32, "kv": 8, "layers": 40},
    "Ministral 3 8B->14B": {"hidden": 5120, "inner": 16384, "heads": 32, "kv": 8, "layers": 40},
}
"""By pair (`benchmarks.shapes.PAIRS`): the target's shapes from its config; heads of 128."""


def forward_seconds(pair: str, tokens: int, dtype: torch.dtype, clock: Any = time.process_time) -> float:
    """Seconds a target layer takes for `tokens`, by transformers' Llama layer; least of two after a warm-up.

    One layer, as a model of one layer without its embedding and head: all layers cost the same.
    """
    from transformers import LlamaConfig, LlamaModel

    shape = TARGETS[pair]
    config = LlamaConfig(
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=128,
        num_hidden_layers=1,
        vocab_size=64,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = LlamaModel(config)
    model = model.to(dtype).to_empty(device="cpu").eval()
    for parameter in model.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    model.rotary_emb.inv_freq = 1e6 ** -(torch.arange(0, 128, 2) / 128)
    ids = torch.arange(tokens)[None] % 64
    best = float("inf")
    with torch.inference_mode():
        for turn in range(3):
            began = clock()
            model(input_ids=ids, use_cache=True)
            if turn:
                best = min(best, clock() - began)
    return best
