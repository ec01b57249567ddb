"""What int8 and bfloat16 weights cost on a real pair, beside the mapper's own error.

    python -m benchmarks.int8 ARTIFACT SOURCE TARGET TEXT [--windows 4 --prefix 320 --tail 48]

For each form of the weights: KL from the target's own distribution and agreement on the likeliest token over
the tail of each window, after the mapped prefix. Writes `benchmarks/results/apply_int8.json`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe, interval, write
from kvhub.mapper.load import load_mapper
from kvhub.mapper.ridge import RidgeMapper
from kvhub.model.load import load_model


def forms(mapper: RidgeMapper) -> dict[str, RidgeMapper]:
    """The same map with its weights rounded, computed in float32: only the weights differ."""
    made = {"stored": mapper}
    tensors = dict(mapper._tensors)
    rounded = {name: t.bfloat16().float() if name.endswith("weight") else t for name, t in tensors.items()}
    made["bfloat16"] = RidgeMapper(mapper.manifest, rounded)
    quantized = dict(tensors)
    for layer, sides in enumerate(mapper.weights().quantized().sides):
        for side, affine in zip("kv", sides, strict=True):
            name = f"layers.{layer}.{side}.weight"
            quantized[name] = affine.dense(torch.float32).reshape(tensors[name].shape)
    made["int8"] = RidgeMapper(mapper.manifest, quantized)
    return made


def compare(native: Tensor, mapped: Tensor) -> tuple[float, float]:
    """Mean KL in nats and share of equal most likely tokens; logits `[tokens, vocabulary]`."""
    p, q = native.float().log_softmax(-1), mapped.float().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean()), float((p.argmax(-1) == q.argmax(-1)).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("text", type=Path)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--prefix", type=int, default=320)
    parser.add_argument("--tail", type=int, default=48)
    options = parser.parse_args()
    source, target = load_model(options.source), load_model(options.target)
    mapper = load_mapper(options.artifact)
    assert isinstance(mapper, RidgeMapper)
    ids = source.tokenizer(options.text.read_text()[:400_000], return_tensors="pt").input_ids[0]
    length = options.prefix + options.tail
    step = len(ids) // options.windows
    scores: dict[str, list[tuple[float, float]]] = {}
    made = forms(mapper)
    for number in range(options.windows):
        window = ids[number * step : number * step + length][None]
        with torch.inference_mode():
            cache = source.model(
                window[:, : options.prefix], use_cache=True, logits_to_keep=1
            ).past_key_values
            native = target.model(window, logits_to_keep=options.tail).logits[0]
            for name, one in made.items():
                mapped = one.map(cache, source=source, target=target)
                tail = target.model(window[:, options.prefix :], past_key_values=mapped).logits[0]
                scores.setdefault(name, []).append(compare(native, tail))
        print(number, {name: values[-1] for name, values in scores.items()}, flush=True)
    result: dict[str, Any] = {"machine": describe(), "digest": mapper.manifest.digest, "k": mapper.manifest.k}
    result |= {"source": source.identity.name, "target": target.identity.name, "prefix": options.prefix}
    for name, values in scores.items():
        kl, top = zip(*values, strict=True)
        result[name] = {"kl": interval(list(kl)), "top1": interval(list(top))}
    write("apply_int8", result)


if __name__ == "__main__":
    main()
