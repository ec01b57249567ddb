"""Optional, for developers: a Qwen2 GGUF file as a model directory in bfloat16."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import AutoTokenizer

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf: Path, folder: Path) -> None:
    """Write `folder` (config, tokenizer, model.safetensors) from a qwen2 GGUF file.

    Upstream ties `lm_head` to the embedding; the file stores that matrix twice, at two
    precisions, and the finer one is kept for both. Raises ValueError for other architectures.
    """
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items() if _is_setting(name)}
    if fields["general.architecture"] != "qwen2":
        raise ValueError(f"{gguf}: architecture {fields['general.architecture']} is not qwen2")
    tensors = {}
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weights = weights.reshape([int(size) for size in reversed(tensor.shape)])
        tensors[_renamed(tensor.name)] = torch.from_numpy(np.ascontiguousarray(weights)).to(torch.bfloat16)
    if "lm_head.weight" in tensors:
        tensors["model.embed_tokens.weight"] = tensors.pop("lm_head.weight")
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(fields, vocabulary=len(tensors["model.embed_tokens.weight"]))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2))
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    # Last: its presence says that the directory is complete.
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _is_setting(name: str) -> bool:
    return name != "tokenizer.ggml.merges" and not name.startswith("tokenizer.ggml.tok")


def _renamed(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        raise ValueError(f"unknown tensor {name}")
    layer, part, kind = match.groups()
    prefix = f"model.layers.{layer}." if layer else ""
    return f"{prefix}{_NAMES[part]}.{kind}"


def _config(fields: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    def get(name: str) -> Any:
        return fields.get(f"qwen2.{name}")

    heads, hidden = get("attention.head_count"), get("embedding_length")
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("rope.dimension_count") or hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": round(float(get("attention.layer_norm_rms_epsilon")), 9),
        "rope_theta": float(get("rope.freq_base")),
        "tie_word_embeddings": True,
        "vocab_size": vocabulary,
        "use_cache": True,
        "use_sliding_window": False,
        "max_window_layers": get("block_count"),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "dtype": "bfloat16",
    }
