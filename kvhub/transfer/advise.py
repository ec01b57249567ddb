"""From a probe to advice: does the pair look workable, and what should a fit try first?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvhub.fit.ridge import Support
from kvhub.model.identity import Geometry
from kvhub.transfer.probe import Outcome, Probe

Verdict = Literal["likely", "doubtful", "unlikely"]
LIKELY, UNLIKELY = 0.6, 0.3
"""Share of the context that a probe's best candidate keeps. Set by hand from the pairs in
docs/diagnostics.md; they are few."""
NEAR = 0.02
"""A cheaper candidate wins where it keeps the context to within this share of the best one."""
FIRST = 3.0
"""Error of the first positions over the others' from which leaving them exact is advised."""
KEYS = 0.65
"""Share of the attention-output error that keys alone make, from which the keys are what to work on."""


@dataclass(frozen=True)
class Advice:
    """What `kvhub transfer` says."""

    verdict: Verdict
    context_kept: float
    """1 - KL(mapped) / KL(no context) of the best candidate: 1 is as good as native, 0 as good as nothing."""
    k: int
    support: Support
    notes: list[str]
    probe: Probe

    def record(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def candidates(source: Geometry, target: Geometry) -> list[tuple[int, Support]]:
    """What is worth probing: a few k from one layer to all, both supports where the head counts allow it."""
    every = source.num_layers
    ks = sorted({k for k in (1, 2, 4, 8) if k < every} | {every})
    supports: list[Support] = ["full"]
    if source.num_kv_heads == target.num_kv_heads:
        supports.append("head-local")
    return [(k, support) for support in supports for k in ks]


def kept(outcome: Outcome, probe: Probe) -> float:
    """Share of the context that a candidate keeps."""
    return 1 - outcome.kl / probe.kl_empty if probe.kl_empty > 0 else 0.0


def cost(outcome: Outcome, heads: int) -> int:
    """Inputs of one output, in heads."""
    return outcome.k * (heads if outcome.support == "full" else 1)


def advise(probe: Probe, heads: int) -> Advice:
    """heads: KV heads of the source."""
    best = max(probe.outcomes, key=lambda one: kept(one, probe))
    near = [one for one in probe.outcomes if kept(one, probe) >= kept(best, probe) - NEAR]
    chosen = min(near, key=lambda one: cost(one, heads))
    share = kept(best, probe)
    verdict: Verdict = "likely" if share >= LIKELY else "doubtful" if share >= UNLIKELY else "unlikely"
    notes = []
    if chosen is not best:
        notes.append(
            f"k = {best.k} {best.support} keeps {share:.0%}, hardly more than the cheaper k = {chosen.k}"
            f" {chosen.support}; more text may widen the gap: let `--k auto` decide"
        )
    if chosen.support == "head-local":
        notes.append(
            "so few rows favour small candidates, and head-local ones are the smallest: compare with"
            " `--support full` before you keep it"
        )
    if best.first_error > FIRST:
        notes.append(
            f"the keys of the first positions err {best.first_error:.1f} times as much as the others:"
            " try --exact-prefix 4"
        )
    if best.key_share > KEYS:
        notes.append(
            f"keys alone make {best.key_share:.0%} of the attention-output error: keep to the default recipe,"
            " which works on keys (its k_norm or stretch, its first row, its gradient steps)"
        )
    elif best.key_share < 1 - KEYS:
        notes.append(
            f"values make {1 - best.key_share:.0%} of the attention-output error: of the default recipe its"
            " stretch and its gradient steps work on values"
        )
    return Advice(verdict, share, chosen.k, chosen.support, notes, probe)
