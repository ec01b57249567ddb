"""What int8 weights cost on a real pair, beside the mapper's own error: paired over held-out windows.

    python -m benchmarks.int8 ARTIFACT SOURCE TARGET --text wiki.utf8 --text c4.utf8 --text code.utf8 \
        --recordings DIR [--windows 6 --prefix 384]

ARTIFACT: a ridge mapper as it is stored. `--windows` of each text are cut from its held-out side, a prefix
and a tail of 128 tokens that is judged; both models run over them once, kept in DIR (what is there is not run
again). Only the weights differ, rows and sums are float32. Writes `benchmarks/results/apply_int8.json`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe, write
from kvhub.artifact.open import open_tensors
from kvhub.evaluation.text import held_out_windows
from kvhub.mapper.load import load_mapper
from kvhub.mapper.quantize import quantized
from kvhub.mapper.ridge import RidgeMapper
from kvhub.model.load import load_model
from kvhub.study.bundle import Bundle, record_all
from kvhub.study.measure import MapperCandidate, measure

TAIL = 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--recordings", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=6, help="of each text")
    parser.add_argument("--prefix", type=int, default=384, help="tokens of a window before the tail")
    parser.add_argument("--name", default="apply_int8", help="of the file in benchmarks/results")
    options = parser.parse_args()
    stored = load_mapper(options.artifact)
    manifest, tensors = quantized(stored)
    forms = {stored.manifest.weights_dtype: open_tensors(options.artifact, stored.manifest), "int8": tensors}
    mappers = {stored.manifest.weights_dtype: stored, "int8": RidgeMapper(manifest, tensors)}
    dtype = stored.manifest.target.dtype
    source = load_model(options.source, getattr(torch, dtype))
    length = options.prefix + TAIL
    count = options.windows * len(options.text)
    domains = held_out_windows(options.text, source.tokenizer, count=count, length=length)
    record_all(source, domains, options.recordings, tail=TAIL)
    identity = source.identity
    del source  # one model at a time
    target = load_model(options.target, getattr(torch, dtype))
    record_all(target, domains, options.recordings, tail=TAIL)
    bundle = Bundle(identity, target.identity, domains, options.recordings, TAIL)
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
    print(write(options.name, result).read_text())


if __name__ == "__main__":
    main()
