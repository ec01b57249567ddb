"""The `mlp` family beside the ridge: the same rows, the same source layers, the same held-out windows.

    python -m benchmarks.mlp SOURCE TARGET --text wiki.utf8 --text c4.utf8 --text code.utf8 --captures DIR \\
        [--layers 7,20] [--hidden 512,512] [--networks layer] [--epochs 6] [--batch 512] [--both]

With --layers networks map these target layers and the ridge all others, so that what differs is these
layers; without it networks map all. Recorded: loss at the end, scores of both arms, their difference paired
over windows, R2 and attention cosine of the layers. A result is kept by pair, layers and networks. Not
measured: serving; `fit_seconds` are wall time of a machine that may have been in use.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace

from torch import Tensor

from benchmarks.machine import RESULTS, describe, write
from benchmarks.study_pair import add_arguments, directions
from kvhub.fit.mlp import MlpSettings
from kvhub.fit.mlp_run import apply_networks, fit_networks
from kvhub.fit.ridge import Regularization
from kvhub.fit.score import apply_ridge
from kvhub.fit.settings import parse_training
from kvhub.study.measure import AffineCandidate, ArmScores
from kvhub.study.pair import StudyPair
from kvhub.study.recipes import stored_bytes


def either(tensors: Mapping[str, Tensor], prefix: str, rows: Tensor, heads: int) -> Tensor:
    """One side of one target layer, by the family that its tensors are of: `[rows, heads, head_dim]`."""
    if f"{prefix}.hidden1.weight" not in tensors:
        return apply_ridge(tensors, prefix, rows)
    return apply_networks(tensors, prefix, rows).view(len(rows), heads, -1)


def arm(scores: ArmScores, layers: list[int]) -> dict[str, object]:
    """What is kept of one family."""
    _, by_layer = scores.summary()
    cosine = scores.cosine()
    return {
        "excess_nll": scores.excess(),
        "kl": scores.mean("mapped", "kl"),
        "top1": scores.mean("mapped", "top1"),
        "wrong_document": scores.excess(arm="wrong-document"),
        "cosine": float(cosine.mean()),
        "cosine_worst": float(cosine.min()),
        "layers": {
            layer: {
                "r2_key": by_layer[layer].r2_key,
                "r2_value": by_layer[layer].r2_value,
                "cosine": float(cosine[layer]),
            }
            for layer in layers
        },
    }


def compare(pair: StudyPair, how: MlpSettings, layers: list[int]) -> dict[str, object]:
    """Both families in one direction."""
    settings, sides = pair.settings, (pair.side(pair.source), pair.side(pair.target))
    ridge = pair.solve(pair.moments(), settings.k, Regularization())
    known = replace(settings, k=len(ridge.layers[0]), train=how)
    began = time.perf_counter()
    networks = fit_networks(ridge, *sides, pair.mixed(), known, how, only=layers)
    seconds = time.perf_counter() - began
    replaced = tuple(f"layers.{layer}." for layer in layers)
    ours = {name: tensor for name, tensor in ridge.tensors.items() if name.startswith(replaced)}
    others = {name: tensor for name, tensor in ridge.tensors.items() if name not in ours}
    shape = pair.target.identity.geometry
    mixed = AffineCandidate(
        {**others, **networks.tensors}, ridge.layers, pair.source.identity, pair.target.identity,
        apply=lambda tensors, prefix, rows: either(tensors, prefix, rows, shape.num_kv_heads),
    )  # fmt: skip
    with_networks, plain = pair.measure(mixed), pair.measure(pair.candidate(ridge))
    assert networks.training is not None
    return {
        "machine": describe(),
        "k": known.k,
        "networks": asdict(how) | {"layers": layers},
        "rows": pair.moments().key.n,
        "steps": networks.training.steps,
        "loss": networks.training.curve,
        "fit_seconds": round(seconds),
        "bytes": {"mlp": stored_bytes(networks), "ridge": stored_bytes(replace(ridge, tensors=ours))},
        "held_out": {name: len(windows) for name, windows in pair.text.held_out.items()},
        "positions": int(plain.positions().sum()),
        "native_nll": plain.mean("native"),
        "source": plain.excess(arm="source"),
        "empty": plain.excess(arm="empty"),
        "mlp": arm(with_networks, layers),
        "ridge": arm(plain, layers),
        "mlp_minus_ridge": {
            metric: asdict(with_networks.difference(plain, metric)) for metric in ("nll", "kl")
        },
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_arguments(parser)
    parser.add_argument("--layers", default=None, help="of the target, with commas; default: all")
    parser.add_argument("--hidden", default="1024,1024")
    parser.add_argument("--networks", choices=["head", "layer"], default="head")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--output", default="mlp", help="name of the file under results/")
    given = parser.parse_args(argv)
    how = parse_training("mlp", None, given.hidden, given.networks, given.epochs, given.batch, default=False)
    assert isinstance(how, MlpSettings)
    for pair, name in directions(given):
        every = range(pair.target.identity.geometry.num_layers)
        layers = list(every) if given.layers is None else [int(part) for part in given.layers.split(",")]
        which = "all layers" if given.layers is None else f"layers {given.layers}"
        label = f"{name}, {which}, {given.hidden} a {how.per}"
        found = compare(pair, how, layers)
        path = RESULTS / f"{given.output}.json"
        known = json.loads(path.read_bytes()) if path.exists() else {}
        write(given.output, dict(sorted((known | {label: found}).items())))
        change = found["mlp_minus_ridge"]["nll"]  # type: ignore[index]
        low, high = change["low"], change["high"]
        print(f"{label}: mlp - ridge {change['value']:+.4f} nat [{low:+.4f}, {high:+.4f}]", flush=True)


if __name__ == "__main__":
    sys.exit(main())
