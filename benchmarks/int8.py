"""What int8 weights cost on a real pair, beside the mapper's own error: paired over held-out windows.

    python -m benchmarks.int8 ARTIFACT SOURCE TARGET WINDOWS RECORDINGS [--windows 6]

ARTIFACT: a ridge mapper as it is stored. WINDOWS: a torch file of `{domain: [n, tokens]}` whose last 128
tokens are judged; RECORDINGS: where both models' native runs on them are kept (`kvhub.study`). Only the
weights differ, rows and sums are float32. Writes `benchmarks/results/apply_int8.json`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe, write
from kvhub.artifact.open import open_tensors
from kvhub.mapper.load import load_mapper
from kvhub.mapper.quantize import quantized
from kvhub.mapper.ridge import RidgeMapper
from kvhub.model.identify import identify
from kvhub.model.load import load_model
from kvhub.study.bundle import Bundle
from kvhub.study.measure import MapperCandidate, measure

TAIL = 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--windows", type=int, default=6, help="of each domain")
    options = parser.parse_args()
    stored = load_mapper(options.artifact)
    manifest, tensors = quantized(stored)
    forms = {stored.manifest.weights_dtype: open_tensors(options.artifact, stored.manifest), "int8": tensors}
    mappers = {stored.manifest.weights_dtype: stored, "int8": RidgeMapper(manifest, tensors)}
    dtype = stored.manifest.target.dtype
    target = load_model(options.target, getattr(torch, dtype))
    texts = torch.load(options.texts, weights_only=True)
    domains = {name: windows[: options.windows] for name, windows in texts.get("held", texts).items()}
    bundle = Bundle(identify(options.source, dtype=dtype), target.identity, domains, options.recordings, TAIL)
    result: dict[str, Any] = {"machine": describe(), "digest": stored.manifest.digest, "k": manifest.k}
    result |= {"source": bundle.source.name, "target": target.identity.name, "forms": {}}
    result["windows"] = {name: len(windows) for name, windows in domains.items()}
    scores = {
        name: measure(MapperCandidate(one), bundle, target, wrong=False) for name, one in mappers.items()
    }
    for name, found in scores.items():
        result["forms"][name] = {
            "kl": found.mean("mapped", "kl"),
            "nll": found.mean("mapped", "nll"),
            "excess": found.excess(),
            "cosine": float(found.cosine().mean()),
            "worst_layer_cosine": float(found.cosine().min()),
        }
    rounded, whole = scores["int8"], scores[stored.manifest.weights_dtype]
    difference = rounded.difference(whole)
    result["bytes"] = {name: sum(t.nbytes for t in made.values()) for name, made in forms.items()}
    result["nll_int8_minus_stored"] = {
        "value": difference.value, "low": difference.low, "high": difference.high
    }  # fmt: skip
    print(write("apply_int8", result).read_text())


if __name__ == "__main__":
    main()
