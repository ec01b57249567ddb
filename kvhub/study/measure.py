"""Score a candidate on a bundle: two short tails of the target a window, all else is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from kvhub.evaluation.arms import WindowResult
from kvhub.evaluation.bootstrap import Bootstrap, Estimate, Statistic, ratio
from kvhub.evaluation.evidence import ALL, Arm, LayerScores, Score
from kvhub.evaluation.inject import KvRows, run
from kvhub.evaluation.metrics import Array, LogitSums, attention_cosines, gap_recovered, row_moments
from kvhub.evaluation.run import wrong_document_order
from kvhub.evaluation.summary import summarize
from kvhub.fit.score import Apply, apply_ridge
from kvhub.mapper.base import Mapper, SourceRows
from kvhub.model.identity import ModelIdentity
from kvhub.model.rope import rotary_table
from kvhub.study.bundle import Bundle
from kvhub.study.compare import Native
from kvhub.study.record import Recording
from kvhub_kernels.rotary import apply_rope, strip_rope

if TYPE_CHECKING:
    from kvhub.model.load import LoadedModel


OTHER = "other"
"""Domain of all texts that were not fitted on."""


class Candidate(Protocol):
    """Anything that turns the source's rows at positions start, start + 1, ... into the target's."""

    def map(self, rows: KvRows, start: int = 0) -> KvRows:
        """Rows in the target's dtype."""
        ...


class AffineCandidate:
    """A mapper that is not written yet: tensors as `kvhub.fit.solve` makes them."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        source_layers: Sequence[Sequence[int]],
        source: ModelIdentity,
        target: ModelIdentity,
        *,
        strip: bool = True,
        turn: bool = True,
        apply: Apply = apply_ridge,
    ) -> None:
        """strip, turn: whether the source's RoPE is removed and the target's applied (False: ablations).

        apply: of the family that the tensors are of.
        """
        self._layers = source_layers
        self._source, self._target = source, target
        self._strip, self._turn, self._apply = strip, turn, apply
        self._tensors = {name: tensor.float() for name, tensor in tensors.items()}

    def map(self, rows: KvRows, start: int = 0) -> KvRows:
        """See `Candidate.map`; computed in float32."""
        positions = torch.arange(start, start + len(rows))
        turn = rotary_table(self._target.rope, positions)
        strip = rotary_table(self._source.rope, positions)
        content = [strip_rope(k.float(), strip) if self._strip else k.float() for k in rows.keys]
        values = [v.float() for v in rows.values]
        dtype = getattr(torch, self._target.dtype)
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        with torch.inference_mode():
            for number, layers in enumerate(self._layers):
                for side, name, inputs in ((0, "k", content), (1, "v", values)):
                    prefix = f"layers.{number}.{name}"
                    x = torch.stack([inputs[layer] for layer in layers], dim=1)
                    y = self._apply(self._tensors, prefix, x)
                    found[side].append((apply_rope(y, turn) if name == "k" and self._turn else y).to(dtype))
        return KvRows(tuple(found[0]), tuple(found[1]))


class MapperCandidate:
    """A loaded mapper of any family, through `map_layer`."""

    def __init__(self, mapper: Mapper) -> None:
        self._mapper = mapper

    def map(self, rows: KvRows, start: int = 0) -> KvRows:
        """See `Candidate.map`."""
        manifest = self._mapper.manifest
        source = SourceRows(
            rows.keys, rows.values, torch.arange(start, start + len(rows)), manifest.source.rope
        )
        dtype = getattr(torch, manifest.target.dtype)
        with torch.inference_mode():
            pairs = [self._mapper.map_layer(n, source) for n in range(manifest.target.geometry.num_layers)]
        return KvRows(tuple(k.to(dtype) for k, _ in pairs), tuple(v.to(dtype) for _, v in pairs))


@dataclass(frozen=True)
class ArmScores:
    """One candidate on one bundle: per-window results, as `kvhub eval` keeps them."""

    results: dict[str, list[WindowResult]]
    """By domain, in the bundle's order. Without the wrong-document arm where it was not run."""

    def per_window(self, arm: Arm = "mapped", metric: str = "nll", *domains: str) -> Array:
        """Sums over scored positions, `[windows]`: `nll`, `kl` or `top1`."""
        return np.array([getattr(w.sums[arm], metric) for w in self._windows(domains)])

    def part(self, names: Sequence[str]) -> ArmScores:
        """Some of the domains."""
        return ArmScores({name: self.results[name] for name in names})

    def parts(self, fitted: Sequence[str], *, domains: bool = True) -> dict[str, ArmScores]:
        """`all` domains that were fitted on, with `domains` each one, and those that were not as `other`."""
        found = {ALL: self.part(fitted)}
        if domains:
            found |= {name: self.part([name]) for name in self.results}
        others = [name for name in self.results if name not in fitted]
        return found | ({OTHER: self.part(others)} if others else {})

    def positions(self, *domains: str) -> Array:
        """Scored positions of every window."""
        return np.array([w.positions for w in self._windows(domains)], dtype=np.float64)

    def mean(self, arm: Arm = "mapped", metric: str = "nll", *domains: str) -> float:
        """A position."""
        return float(self.per_window(arm, metric, *domains).sum() / self.positions(*domains).sum())

    def excess(self, *domains: str, arm: Arm = "mapped") -> float:
        """NLL over native, nat a position."""
        return self.mean(arm, "nll", *domains) - self.mean("native", "nll", *domains)

    def cosine(self, *domains: str) -> Array:
        """Attention-output cosine by layer, mean over windows and heads."""
        found: Array = np.stack([w.cosine.mean(1) for w in self._windows(domains)]).mean(0)
        return found

    def summary(self, *, resamples: int = 2000, seed: int = 0) -> tuple[list[Score], list[LayerScores]]:
        """Scores with intervals, as in `evidence.json`; needs the wrong-document arm."""
        return summarize(self.results, resamples=resamples, seed=seed)

    def over_native(self, metric: str = "nll", *, resamples: int = 2000, seed: int = 0) -> Estimate:
        """Mapped minus native, a position, with its interval."""
        gap = self.per_window("mapped", metric) - self.per_window("native", metric)
        return self._estimate(lambda w: ratio(w, gap, self.positions()), resamples, seed)

    def gap(self, *, resamples: int = 2000, seed: int = 0) -> Estimate:
        """Gap recovered; NaN where the target is not better than the source beyond chance."""
        native, source, mapped = (self.per_window(arm) for arm in ("native", "source", "mapped"))
        counts = self.positions()
        nothing = Estimate(float("nan"), float("nan"), float("nan"))
        between = self._estimate(lambda w: ratio(w, source - native, counts), resamples, seed)
        if not between.low > 0:
            return nothing
        return self._estimate(lambda w: gap_recovered(w @ native, w @ source, w @ mapped), resamples, seed)

    def difference(
        self, other: ArmScores, metric: str = "nll", *, resamples: int = 2000, seed: int = 0
    ) -> Estimate:
        """Mapped minus `other`'s mapped, a position: paired over the same windows."""
        gap = self.per_window("mapped", metric) - other.per_window("mapped", metric)
        return self._estimate(lambda w: ratio(w, gap, self.positions()), resamples, seed)

    def share_removed(self, other: ArmScores, *, resamples: int = 2000, seed: int = 0) -> Estimate:
        """1 - excess NLL of this over that of `other`: 0.5 where half the loss is gone. Paired."""
        mine = self.per_window() - self.per_window("native")
        theirs = other.per_window() - other.per_window("native")
        return self._estimate(lambda w: 1 - (w @ mine) / (w @ theirs), resamples, seed)

    def _estimate(self, statistic: Statistic, resamples: int, seed: int) -> Estimate:
        strata = [len(windows) for windows in self.results.values()]
        return Bootstrap(strata, resamples=resamples, seed=seed).estimate(statistic)

    def _windows(self, domains: Sequence[str]) -> list[WindowResult]:
        return [w for name in domains or self.results for w in self.results[name]]


def measure(
    candidate: Candidate,
    bundle: Bundle,
    target: LoadedModel,
    *,
    exact_prefix: int = 0,
    wrong: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> ArmScores:
    """All arms of `candidate` on every window of `bundle`.

    wrong: also the wrong-document arm (another window of the same domain, as `kvhub eval` pairs them),
    which doubles the tails. Errors: `Corrupt` where mapped rows or logits are not finite.
    """
    results: dict[str, list[WindowResult]] = {}
    done = 0
    for name, windows in bundle.domains.items():
        order = wrong_document_order(len(windows)) if wrong else list(range(len(windows)))
        before = candidate.map(bundle.mapped_from(windows[order[-1]]).rows) if wrong else None
        found: dict[int, WindowResult] = {}
        for index in order:
            native = bundle.native(windows[index])
            mapped = candidate.map(bundle.mapped_from(windows[index]).rows)
            mapped.check_finite("the mapped cache")
            found[index] = _window(bundle, target, native, mapped, before, exact_prefix)
            before = mapped if wrong else None
            done += 1
            if progress is not None:
                progress(done, bundle.windows)
        results[name] = [found[index] for index in range(len(windows))]
    return ArmScores(results)


def _window(
    bundle: Bundle,
    target: LoadedModel,
    native: Recording,
    mapped: KvRows,
    wrong: KvRows | None,
    exact: int,
) -> WindowResult:
    served = mapped.with_exact_prefix(native.rows, exact)
    against = Native(native.logits, native.labels)
    sums: dict[Arm, LogitSums] = {
        "native": native.native,
        "source": bundle.source_sums(native.window, native),
        "empty": native.empty,
    }
    arms: list[tuple[Arm, KvRows]] = [("mapped", served)]
    if wrong is not None:
        arms.append(("wrong-document", wrong.with_exact_prefix(native.rows, exact)))
    for arm, rows in arms:
        logits, _ = run(target.model, native.tail, start=len(native.rows), rows=rows)
        sums[arm] = against.sums(logits)
    cosine = attention_cosines(native.queries, native.scaling, native.rows, served)
    keys, values = row_moments(native.rows, served, bundle.target.rope, exact)
    return WindowResult(len(native.labels), sums, cosine, keys, values, native.injection_error)


def cosines(candidate: Candidate, bundle: Bundle, *, exact_prefix: int = 0) -> Array:
    """Attention-output cosine of every layer and head over all windows, `[windows, layers, heads]`.

    No forward at all: mapped rows and recorded queries.
    """
    found = []
    for windows in bundle.domains.values():
        for window in windows:
            native = bundle.native(window, logits=False)
            mapped = candidate.map(bundle.mapped_from(window).rows)
            served = mapped.with_exact_prefix(native.rows, exact_prefix)
            found.append(attention_cosines(native.queries, native.scaling, native.rows, served))
    return np.stack(found)
