"""Tiny random models with a real tokenizer, for tests that need two models and no training."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TEXT = (
    "The river ran past the mill and under the bridge. A stone does not float, a boat does. "
    "In the morning the miller opened the gate and the wheel began to turn; def turn(wheel): return wheel\n"
    "Numbers: 0 1 2 3 5 8 13 21 34 55 89 144. Ärger, naïve, 東京, 🚲.\n"
) * 4

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_tiny(
    path: Path,
    *,
    model_type: str = "qwen3",
    layers: int = 3,
    kv_heads: int = 2,
    heads: int = 4,
    head_dim: int = 16,
    hidden: int = 48,
    vocab: int = 320,
    rope_parameters: Mapping[str, Any] | None = None,
    seed: int = 0,
    dtype: str = "float32",
    shard: str = "1GB",
    **config: Any,
) -> Path:
    """Save a random model and a byte-level BPE tokenizer (at least 257 tokens) in `path`; returns `path`.

    The tokenizer depends on `vocab` alone; its one special token is the one that Qwen2 would add.
    Weights are drawn wide (std 0.15) so that attention is not flat. Built once per process for equal
    arguments, then copied.
    """
    given = rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}
    rope = tuple(sorted((key, tuple(v) if isinstance(v, list) else v) for key, v in given.items()))
    built = _build(
        model_type, layers, kv_heads, heads, head_dim, hidden, vocab, rope, seed, dtype, shard,
        tuple(sorted(config.items())),
    )  # fmt: skip
    shutil.copytree(built, path, dirs_exist_ok=True)
    return path


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvhub-tiny-")


@functools.cache
def _build(
    model_type: str,
    layers: int,
    kv_heads: int,
    heads: int,
    head_dim: int,
    hidden: int,
    vocab: int,
    rope: tuple[tuple[str, Any], ...],
    seed: int,
    dtype: str,
    shard: str,
    extra: tuple[tuple[str, Any], ...],
) -> Path:
    path = Path(tempfile.mkdtemp(dir=_root().name))
    tokenizer = make_tokenizer(vocab)
    values: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "vocab_size": len(tokenizer) + 3,  # padded, as real embeddings are
        "max_position_embeddings": 4096,
        "rope_parameters": {key: list(v) if isinstance(v, tuple) else v for key, v in rope},
        "sliding_window": None,
        "use_sliding_window": False,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    config = AutoConfig.for_model(model_type, **(values | dict(extra)))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):  # ones would hide a norm that is left out
                weight.data.uniform_(0.5, 1.5)
    model.save_pretrained(path, max_shard_size=shard)
    tokenizer.save_pretrained(path)
    return path


@functools.cache
def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocab` tokens (or fewer, where the text has no more pairs)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    # Every special token named: Qwen2's class fills in what is absent, others do not.
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
