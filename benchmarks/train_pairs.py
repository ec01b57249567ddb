"""Train more small models on the shipped pair's tokenizer, so that every two of them make a pair.

    python benchmarks/train_pairs.py --text TEXT --output DIR [--only NAME]

TEXT is the folder that `tools/train_pair.py` reads (wiki.utf8, c4.utf8, tiny.utf8). The shipped pair has 8 KV
heads of 32 and k_norm on both sides. From it come

    kv2     `small` with 2 KV heads: each the mean of four, as arXiv 2305.13245 makes grouped queries
    plain   `large` as a Llama: no q_norm and k_norm, their weights folded into the projections

each then trained on until it reads again. Training from nothing would take half an hour of CPU to form the
recall that a fixture needs (a model that ignores its context makes every mapper look good); this takes
minutes. The price: each has a parent. small-kv2 and large-plain are pairs of relatives, the others are not.

The weights are not kept in the repository: the same text and seed give them again. Each folder gets a
`train_report.json` with held-out losses and the cost of a wrong prefix.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import train_pair as base  # noqa: E402

STEPS = {"kv2": 160, "plain": 60}
CARRIED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")


def options(config: Any, **changes: Any) -> dict[str, Any]:
    """What a descendant's config takes over."""
    values = {name: getattr(config, name) for name in CARRIED} | {
        "vocab_size": config.vocab_size,
        "num_key_value_heads": config.num_key_value_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": dict(config.rope_parameters),
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return values | changes


def grouped(parent: Any, heads: int) -> Any:
    """`parent` with fewer KV heads: projections of neighbours averaged."""
    config = Qwen3Config(**options(parent.config, num_key_value_heads=heads))
    model = type(parent)(config)
    weights = parent.state_dict()
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            rows = weight.view(heads, -1, config.head_dim, weight.shape[1])
            weights[name] = rows.mean(1).flatten(0, 1)
    model.load_state_dict(weights)
    return model


@torch.no_grad()
def without_norms(parent: Any, text: Tensor) -> Any:
    """`parent` as a Llama: each head's projection scaled as its norm scales it on average over `text`."""
    sizes: dict[str, Tensor] = {}
    hooks = []
    for name, module in parent.named_modules():
        if name.endswith((".q_norm", ".k_norm")):

            def keep(_module: Any, inputs: tuple[Tensor], _output: Tensor, name: str = name) -> None:
                sizes[name] = inputs[0].float().square().mean(-1).sqrt().mean((0, 1))

            hooks.append(module.register_forward_hook(keep))
    parent.eval()
    parent(input_ids=text[: 16 * base.WINDOW].view(16, base.WINDOW))
    for hook in hooks:
        hook.remove()
    model = LlamaForCausalLM(LlamaConfig(**options(parent.config)))
    weights = parent.state_dict()
    for name in [name for name in weights if name.endswith(("q_norm.weight", "k_norm.weight"))]:
        norm = weights.pop(name)
        projection = name.replace("_norm", "_proj")
        scale = norm[None, :] / sizes[name.removesuffix(".weight")][:, None]  # [heads, head_dim]
        weights[projection] = weights[projection] * scale.flatten()[:, None]
    model.load_state_dict(weights)
    return model


def make(name: str, text: Tensor) -> Any:
    """An untrained descendant."""
    parent = {"kv2": "small", "plain": "large"}[name]
    model = AutoModelForCausalLM.from_pretrained(ROOT / "models" / parent, dtype=torch.float32)
    return grouped(model, 2) if name == "kv2" else without_norms(model, text)


def main() -> None:
    """Train, save in bfloat16, and judge what was saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="folder with wiki.utf8, c4.utf8, tiny.utf8")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", choices=[*STEPS], action="append")
    given = parser.parse_args()
    torch.set_num_threads(1)
    training, held_out = base.split(given.text)
    tok = base.tokenizer(ROOT / "models" / "small" / "tokenizer.json", training)
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(base.SEED)).tolist()
    text = base.encode(tok, [training[i] for i in order])
    judged = {
        name: base.encode(tok, base.without_overlap(tok, found, text)) for name, found in held_out.items()
    }
    for name in given.only or STEPS:
        torch.manual_seed(base.SEED)
        model = make(name, text)
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{name}: {size / 1e6:.2f} M parameters, {STEPS[name]} steps", flush=True)
        print(f"  before: recall {base.recall(model, judged['c4'])}", flush=True)
        started = time.process_time()
        base.train(model, text, judged["c4"], STEPS[name], 0)
        seconds = time.process_time() - started
        folder = given.output / name
        model.to(torch.bfloat16).save_pretrained(folder)
        tok.save_pretrained(folder)
        saved = type(model).from_pretrained(folder, dtype=torch.float32)
        found = {label: base.judge(saved, ids) for label, ids in judged.items()}
        report = {"params": size, "steps": STEPS[name], "cpu_s": seconds, "val": found}
        (folder / "train_report.json").write_text(json.dumps(report, indent=1))
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
