"""Fit every candidate on most of a few windows, apply it to the others, see what the target makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvhub.diagnostics.observe import Observation, observe
from kvhub.diagnostics.summary import window_values
from kvhub.diagnostics.window import WindowDiagnosis, diagnose_window
from kvhub.evaluation.inject import KvRows, run
from kvhub.evaluation.metrics import compare_logits
from kvhub.fit.ridge import Support
from kvhub.fit.selection import top_layers
from kvhub.model.identity import RopeSpec
from kvhub.model.rope import rotary_table
from kvhub.transfer.dual import Fold, folds, head_kernels, predict
from kvhub.transfer.layers import cross_validated_scores
from kvhub_kernels.rotary import apply_rope, strip_rope

if TYPE_CHECKING:
    from kvhub.model.load import LoadedModel

STRENGTHS = (1e-2, 1e-1, 1.0)
"""Relative lambdas tried for each candidate; few rows want strong ones, and the best counts."""
FOLDS = 3


@dataclass(frozen=True)
class Outcome:
    """One candidate on held-out windows, from a fit on the others."""

    k: int
    support: Support
    attention_cosine: float
    residual_error: float
    kl: float
    """Of the tail, nat a token."""
    excess_nll: float
    top1: float
    key_share: float
    """Of the attention-output error: what remains of it where values are native, over what both make."""
    first_error: float
    """Key error of positions 0-3 over that of the others."""


@dataclass(frozen=True)
class Probe:
    """All candidates, and what the target does without any context."""

    outcomes: list[Outcome]
    kl_empty: float
    tokens: int
    """Positions fitted on and mapped, over all windows."""
    scores: list[list[float]]
    """Held-out R2 of every source layer alone, `[target layers][source layers]`."""


def probe_pair(
    source: LoadedModel,
    target: LoadedModel,
    windows: Tensor,
    candidates: Sequence[tuple[int, Support]],
    *,
    tail: int,
    progress: Callable[[int, int], None] | None = None,
) -> Probe:
    """windows: `[n >= 3, prefix + tail]` int64. candidates: (k, support).

    Every window is held out once. Errors: those of `observe`.
    """
    seen = [observe(source, target, window, tail) for window in windows]
    length, shape = seen[0].split, target.identity.geometry
    inputs, outputs = _rows(seen, source.identity.rope)
    kernels = head_kernels(inputs[0]), head_kernels(inputs[1])
    parts = folds(len(windows), length, FOLDS)
    scores = cross_validated_scores(kernels, outputs, source.identity.geometry.features, parts)
    tails = [_Tail(target, window, one) for window, one in zip(windows, seen, strict=True)]
    outcomes = []
    for number, (k, support) in enumerate(candidates):
        chosen = top_layers(scores, k)
        features = k * (
            source.identity.geometry.features if support == "full" else source.identity.geometry.head_dim
        )
        mapped = _mapped(kernels, outputs, chosen, support, features, parts, shape.num_kv_heads)
        outcomes.append(_judge(k, support, mapped, seen, tails))
        if progress is not None:
            progress(number + 1, len(candidates))
    empty = sum(tail.empty for tail in tails) / sum(tail.count for tail in tails)
    return Probe(outcomes, empty, len(windows) * length, scores.tolist())


class _Tail:
    """The native tail of one window, to compare mapped ones with: on the rows that were observed."""

    def __init__(self, target: LoadedModel, window: Tensor, seen: Observation) -> None:
        self._target, self._split = target, seen.split
        self._tokens, self._labels = window[self._split : -1], window[self._split + 1 :]
        self._native, _ = run(target.model, self._tokens, start=self._split, rows=seen.prefix)
        self._nll = compare_logits(self._native, self._native, self._labels).nll
        self.count = len(self._tokens)
        self.empty = self.of(None)[1]

    def of(self, rows: KvRows | None) -> tuple[float, float, float]:
        """(excess NLL, KL, top-1) summed over positions."""
        logits, _ = run(self._target.model, self._tokens, start=self._split, rows=rows)
        sums = compare_logits(self._native, logits, self._labels)
        return sums.nll - self._nll, sums.kl, sums.top1


Sides = tuple[list[Tensor], list[Tensor]]


def _rows(seen: Sequence[Observation], rope: RopeSpec) -> tuple[Sides, Sides]:
    """(source content keys, values by layer `[rows, H, D]`), (the target's, `[rows, F]` float64)."""

    def content(keys: Sequence[Tensor], spec: RopeSpec) -> list[Tensor]:
        table = rotary_table(spec, torch.arange(len(keys[0]), device=keys[0].device))
        return [strip_rope(key.float(), table).cpu() for key in keys]

    prefixes = [one.prefix for one in seen]
    source_keys = [content(one.source.keys, rope) for one in seen]
    target_keys = [content(one.keys, seen[0].rope) for one in prefixes]

    def join(parts: Sequence[Sequence[Tensor]], flat: bool) -> list[Tensor]:
        joined = [torch.cat([rows.cpu() for rows in layer]) for layer in zip(*parts, strict=True)]
        return [rows.flatten(1).double() for rows in joined] if flat else joined

    values = [one.source.values for one in seen], [one.values for one in prefixes]
    return (join(source_keys, False), join(values[0], False)), (
        join(target_keys, True),
        join(values[1], True),
    )


def _mapped(
    kernels: tuple[Tensor, Tensor],
    outputs: Sides,
    chosen: Sequence[Sequence[int]],
    support: Support,
    features: int,
    parts: Sequence[Fold],
    heads: int,
) -> list[list[Tensor]]:
    """Held-out rows by (K, V) and target layer: `[strengths, rows, F]`."""
    found: list[list[Tensor]] = [[], []]
    for side in range(2):
        for layer, layers in enumerate(chosen):
            wanted = outputs[side][layer]
            rows = wanted.new_empty(len(STRENGTHS), *wanted.shape)
            if support == "full":
                groups = [(kernels[side][layers].sum((0, 1)), slice(0, wanted.shape[1]))]
            else:
                width = wanted.shape[1] // heads
                summed = kernels[side][layers].sum(0)
                groups = [(summed[h], slice(h * width, (h + 1) * width)) for h in range(heads)]
            for kernel, columns in groups:
                for fold in parts:
                    values = predict(kernel, features, wanted[:, columns], fold, STRENGTHS)
                    rows[:, fold.held_out, columns] = values
            found[side].append(rows)
    return found


def _judge(
    k: int, support: Support, mapped: list[list[Tensor]], seen: Sequence[Observation], tails: Sequence[_Tail]
) -> Outcome:
    """The strength whose error moves the residual stream least, judged."""
    tried = [
        [diagnose_window(one, _cache(mapped, strength, number, one)) for number, one in enumerate(seen)]
        for strength in range(len(STRENGTHS))
    ]
    values = [_means(diagnoses) for diagnoses in tried]
    best = min(range(len(values)), key=lambda one: values[one]["output_error"])
    sums = np.zeros(3)
    keys_only = 0.0
    for number, (one, tail) in enumerate(zip(seen, tails, strict=True)):
        rows = _cache(mapped, best, number, one)
        sums += tail.of(rows)
        routed = diagnose_window(one, KvRows(rows.keys, one.prefix.values))
        keys_only += float(routed.output_error.mean()) / len(seen)
    positions = sum(tail.count for tail in tails)
    errors = np.stack([one.key_errors for one in tried[best]]).mean((0, 1))
    return Outcome(
        k=k,
        support=support,
        attention_cosine=values[best]["attention_cosine"],
        residual_error=values[best]["residual_error"],
        kl=float(sums[1] / positions),
        excess_nll=float(sums[0] / positions),
        top1=float(sums[2] / positions),
        key_share=keys_only / max(values[best]["output_error"], 1e-12),
        first_error=float(errors[:4].mean() / max(errors[4:].mean(), 1e-12)) if len(errors) > 4 else 1.0,
    )


def _means(diagnoses: Sequence[WindowDiagnosis]) -> dict[str, float]:
    found = [window_values(one) for one in diagnoses]
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def _cache(mapped: list[list[Tensor]], strength: int, window: int, seen: Observation) -> KvRows:
    """Rows of one window as the target would cache them."""
    rows = slice(window * seen.split, (window + 1) * seen.split)
    like = seen.native.keys[0]
    shape = (seen.split, *like.shape[1:])
    table = rotary_table(seen.rope, torch.arange(seen.split))
    keys = [layer[strength, rows].float().view(shape) for layer in mapped[0]]
    return KvRows(
        tuple(apply_rope(key, table).to(like.device, like.dtype) for key in keys),
        tuple(layer[strength, rows].view(shape).to(like.device, like.dtype) for layer in mapped[1]),
    )
