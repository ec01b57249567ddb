"""Points for `correlation.py` from recordings on disk: for pairs whose models are too large to run again.

    python -m benchmarks.correlation_recorded SOURCE TARGET --windows windows.pt --recordings DIR \\
        --mapper NAME=DIR ... --output benchmarks/results/correlation.csv

Recordings are those of `kvhub.study.bundle`; mappers are finished ones of any family, or files of saved
`{"tensors", "layers"}` as `kvhub.fit.solve` makes them (without the R2 of their fit). Windows take turns, as
in `correlation_points.py`: diagnostics on one half, the loss on the other. Recordings hold the prefix alone:
attention is over it only, and the push on the residual stream is not measured.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.correlation_points import append
from kvhub.diagnostics.attention import attention_weights, per_query_head
from kvhub.diagnostics.key_concentration import key_error_concentration
from kvhub.diagnostics.positions import position_errors
from kvhub.diagnostics.summary import FIRST
from kvhub.diagnostics.value_concentration import value_error_concentration
from kvhub.errors import Incompatible
from kvhub.evaluation.inject import KvRows
from kvhub.mapper.load import load_mapper
from kvhub.model.identify import identify
from kvhub.model.identity import ModelIdentity, RopeSpec
from kvhub.model.load import load_model
from kvhub.model.rope import rotary_table
from kvhub.study.bundle import Bundle
from kvhub.study.measure import AffineCandidate, ArmScores, Candidate, MapperCandidate, measure
from kvhub.study.record import Recording
from kvhub_kernels.rotary import strip_rope


def layer_values(native: Recording, served: KvRows, rope: RopeSpec, skip: int) -> dict[str, Tensor]:
    """Diagnostics of one window by layer, `[layers]` each."""
    table = rotary_table(rope, torch.arange(len(native.rows)))
    found: dict[str, list[Tensor]] = {}
    for layer, scaling in enumerate(native.scaling):
        queries = native.queries[layer].float()
        keys, values = native.rows.keys[layer].float(), native.rows.values[layer].float()
        key, value = served.keys[layer].float(), served.values[layer].float()
        before, after = (attention_weights(queries, k, scaling) for k in (keys, key))
        heads = queries.shape[0]
        right, wrong = before @ per_query_head(values, heads), after @ per_query_head(value, heads)
        tiny = torch.finfo(torch.float32).tiny
        kl = (before * (before.clamp_min(tiny).log() - after.clamp_min(tiny).log())).sum(-1)
        errors = [
            position_errors(strip_rope(keys, table)[skip:], strip_rope(key, table)[skip:]),
            position_errors(values[skip:], value[skip:]),
        ]
        key_error, value_error = (one.errors / one.spread for one in errors)
        now = {
            "attention_cosine": torch.cosine_similarity(right, wrong, dim=-1).mean(),
            "k_error_concentration": key_error_concentration(queries, keys, key).mean(),
            "v_error_concentration": value_error_concentration(before, values, value).mean(),
            "attention_kl": kl.mean(),
            "output_error": ((wrong - right).square().sum((1, 2)) / right.square().sum((1, 2))).mean(),
            "key_error": key_error.mean(),
            "value_error": value_error.mean(),
            "key_error_first": key_error[:FIRST].mean(),
            "value_error_first": value_error[:FIRST].mean(),
        }
        for name, one in now.items():
            found.setdefault(name, []).append(one.double())
    return {name: torch.stack(parts) for name, parts in found.items()}


def predictors(windows: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Means over windows and layers, and worst layers."""
    means = {name: torch.stack([one[name] for one in windows]).mean(0) for name in windows[0]}
    found = {name: float(value.mean()) for name, value in means.items()}
    found["attention_cosine_worst"] = float(means["attention_cosine"].min())
    for name in ("attention_kl", "output_error"):
        found[f"{name}_worst"] = float(means[name].max())
    for side in ("key", "value"):
        found[f"r2_{side}"] = 1 - found[f"{side}_error"]
    return found


def halves(scores: ArmScores) -> dict[str, float]:
    """Loss on every second window, and on the others as a probe."""
    positions = scores.positions()
    odd = np.arange(len(positions)) % 2 == 1

    def mean(values: np.ndarray, chosen: np.ndarray) -> float:
        return float(values[chosen].sum() / positions[chosen].sum())

    excess = scores.per_window("mapped", "nll") - scores.per_window("native", "nll")
    kl, top1 = (scores.per_window("mapped", metric) for metric in ("kl", "top1"))
    return {
        "excess_nll": mean(excess, odd), "kl": mean(kl, odd), "top1": mean(top1, odd),
        "positions": float(positions[odd].sum()),
        "probe_excess_nll": mean(excess, ~odd), "probe_kl": mean(kl, ~odd),
    }  # fmt: skip


def read_candidate(
    place: Path, source: ModelIdentity, target: ModelIdentity
) -> tuple[Candidate, dict[str, float], int]:
    """(mapper, R2 of its fit where it is known, exact first positions).

    Errors: `Incompatible` where it is of other models.
    """
    if place.is_dir():
        mapper = load_mapper(place)
        about = mapper.manifest
        if (about.source.digest, about.target.digest) != (source.digest, target.digest):
            raise Incompatible(f"{place.name} is a mapper of other models", code="identity")
        fit = about.fit_scores
        found = {"key": float(np.mean(fit.r2_key)), "value": float(np.mean(fit.r2_value))}
        return (
            MapperCandidate(mapper),
            {f"calibration_r2_{side}": r2 for side, r2 in found.items()},
            about.exact_prefix,
        )
    saved = torch.load(place, weights_only=True)
    if len(saved["layers"]) != target.geometry.num_layers:
        raise Incompatible(f"{place.name} is a mapper of other models", code="identity")
    return AffineCandidate(saved["tensors"], saved["layers"], source, target), {}, 0


def main() -> None:
    """Measure and append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument(
        "--windows", type=Path, required=True, help="{domain: [n, prefix + tail]}, torch.save"
    )
    parser.add_argument("--recordings", type=Path, required=True)
    parser.add_argument("--tail", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mapper", action="append", required=True, help="NAME=DIR")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    windows = torch.load(given.windows, weights_only=True)
    source = identify(given.source, dtype=given.dtype)
    target = load_model(given.target, getattr(torch, given.dtype))
    bundle = Bundle(source, target.identity, windows, given.recordings, given.tail)
    for entry in given.mapper:
        name, _, directory = entry.partition("=")
        candidate, calibration, exact = read_candidate(Path(directory), source, target.identity)
        scores = measure(candidate, bundle, target, exact_prefix=exact, wrong=False)
        seen = []
        for number, window in enumerate(itertools.chain.from_iterable(windows.values())):
            if number % 2 == 0:
                native = bundle.native(window, logits=False)
                served = candidate.map(bundle.mapped_from(window).rows).with_exact_prefix(native.rows, exact)
                seen.append(layer_values(native, served, target.identity.rope, exact))
        names = given.source.name, given.target.name
        about = {"pair": "+".join(sorted(names)), "source": names[0], "target": names[1], "recipe": name}
        append(given.output, about | halves(scores) | calibration | predictors(seen))
        print(f"{name}: excess {scores.excess():.4f}", flush=True)


if __name__ == "__main__":
    main()
