"""Train more small models on the shipped pair's tokenizer, so that every two of them make a pair.

    python benchmarks/train_pairs.py --text TEXT --output DIR [--only NAME]

TEXT is the folder that `tools/train_pair.py` reads (wiki.utf8, c4.utf8, tiny.utf8), and the training is that
script's, in one stage: repetition at a constant rate until recall forms, then the usual mix. What is new are the
shapes. The shipped pair has 8 KV heads of 32 and k_norm on both sides; these add models without k_norm, with
fewer and larger heads, and with another rotation. The weights are not kept in the repository: the same text,
seed and machine give them again in about ten CPU minutes each. Each folder gets a `train_report.json` with
held-out losses and the cost of a wrong prefix; a model that ignores its context makes every mapper look good.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import train_pair as base  # noqa: E402

RECALL_STEPS = 900
STEPS = 1700
SHAPES: dict[str, dict[str, Any]] = {
    "llama-h8": {"kind": "llama", "layers": 8, "heads": 8, "kv": 8, "dim": 32, "theta": 10000.0},
    "qwen3-h2": {"kind": "qwen3", "layers": 7, "heads": 8, "kv": 2, "dim": 48, "theta": 50000.0},
    "llama-h4": {"kind": "llama", "layers": 6, "heads": 8, "kv": 4, "dim": 32, "theta": 50000.0},
}
"""kv: key and value heads; dim: their size. All have hidden size 128 and 384 inside the MLP."""


def fresh(shape: dict[str, Any], vocabulary: int) -> Any:
    """A new model of one of `SHAPES`."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(base.SEED)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[shape["kind"]]
    config = config_class(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=shape["dim"],
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": shape["theta"]},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return model_class(config)


def main() -> None:
    """Train, save in bfloat16, and judge what was saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="folder with wiki.utf8, c4.utf8, tiny.utf8")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", choices=[*SHAPES], action="append")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--recall-steps", type=int, default=RECALL_STEPS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    training, held_out = base.split(given.text)
    tok = base.tokenizer(ROOT / "models" / "small" / "tokenizer.json", training)
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(base.SEED)).tolist()
    text = base.encode(tok, [training[i] for i in order])
    judged = {
        name: base.encode(tok, base.without_overlap(tok, found, text)) for name, found in held_out.items()
    }
    for name in given.only or SHAPES:
        model = fresh(SHAPES[name], len(tok))
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name}: {size / 1e6:.2f} M parameters, {given.steps} steps", flush=True)
        started = time.process_time()
        formed = base.train(model, text, judged["c4"], given.steps, given.recall_steps)
        seconds = time.process_time() - started
        folder = given.output / name
        model.to(torch.bfloat16).save_pretrained(folder)
        tok.save_pretrained(folder)
        saved = type(model).from_pretrained(folder, dtype=torch.float32)
        found = {label: base.judge(saved, ids) for label, ids in judged.items()}
        report = {"params": size, "cpu_s": seconds, "recall_formed_at": formed, "val": found}
        (folder / "train_report.json").write_text(json.dumps(report, indent=1))
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
