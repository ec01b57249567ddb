"""The gate: the one place that decides whether a mapper may serve.

Every condition is decided on the worst text domain, never on the mean, and
nothing but the recorded scores is read: an evidence file that came with a
mapper is judged here again, with our thresholds, and its own verdict is not
believed. R2 takes no part: on the pairs of arXiv 2608.03893 calibration R2 of
the keys correlates -0.20 with retained accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvhub.artifact.manifest import Manifest
from kvhub.errors import Corrupt
from kvhub.evaluation.evidence import ALL, Arm, Evidence, GateCheck, Score, Verdict


@dataclass(frozen=True)
class Gate:
    """Thresholds; each stands in the verdict as the `limit` of its check."""

    min_positions: int = 384
    """Scored positions a domain needs."""
    min_top1: float = 0.80
    max_excess_nll: float = 0.25
    """nat a token, mapped over native."""
    max_injection_error: float = 0.5
    """No evaluation accepts more; a record that claims more was not made by one."""


def judge(
    scores: Sequence[Score],
    *,
    injection_error: float,
    exact_prefix: int,
    served_exact_prefix: int | None = None,
    gate: Gate | None = None,
) -> Verdict:
    """Decide from scores alone.

    exact_prefix: rows that were native in the measured arms; served_exact_prefix: how many the
    mapper's manifest asks serving to hold (None: unknown, not checked). Measuring with more than
    is served would flatter the mapper, so that fails.

    `better-than-source` asks that the mapped cache serves the text better than not switching at
    all. Where the source alone is at least as good as the native target on all text together (a
    step down to a smaller model), no mapper can pass that and none needs to: the check then only
    records by how much the source is ahead.
    """
    gate = gate or Gate()
    table = {(score.metric, score.arm, score.domain): score for score in scores}
    domains = sorted({score.domain for score in scores} - {ALL})
    if not domains:
        return Verdict(passed=False, checks=[_missing("positions", ALL, gate.min_positions)])

    def value(metric: str, arm: Arm, domain: str) -> float | None:
        score = table.get((metric, arm, domain))
        return None if score is None else score.value

    def worst(name: str, found: dict[str, float | None], limit: float, *, at_least: bool) -> GateCheck:
        for domain in domains:
            if found[domain] is None:
                return _missing(name, domain, limit)
        known = {domain: number for domain, number in found.items() if number is not None}
        domain = (min if at_least else max)(known, key=lambda d: known[d])
        passed = known[domain] >= limit if at_least else known[domain] <= limit
        return GateCheck(name=name, passed=passed, found=known[domain], limit=limit, domain=domain)

    def margin(arm: Arm, domain: str) -> float | None:
        mapped, other = value("nll", "mapped", domain), value("nll", arm, domain)
        return None if mapped is None or other is None else other - mapped

    def better(arm: Arm) -> GateCheck:
        check = worst(f"better-than-{arm}", {d: margin(arm, d) for d in domains}, 0.0, at_least=True)
        return check.model_copy(update={"passed": check.passed and check.found > 0})

    positions = {d: table.get(("nll", "mapped", d)) for d in domains}
    checks = [
        worst(
            "positions",
            {d: None if s is None else float(s.n) for d, s in positions.items()},
            gate.min_positions,
            at_least=True,
        ),
        worst("top1", {d: value("top1", "mapped", d) for d in domains}, gate.min_top1, at_least=True),
        worst("excess-nll", {d: _excess(table, d) for d in domains}, gate.max_excess_nll, at_least=False),
    ]
    source, native = value("nll", "source", ALL), value("nll", "native", ALL)
    if source is not None and native is not None and source <= native:
        found = native - source
        checks.append(GateCheck(name="source-is-stronger", passed=True, found=found, limit=0.0, domain=ALL))
    else:
        checks.append(better("source"))
    checks += [better("empty"), better("wrong-document")]
    checks.append(
        GateCheck(
            name="injection",
            passed=0 <= injection_error <= gate.max_injection_error,
            found=injection_error,
            limit=gate.max_injection_error,
            domain=ALL,
        )
    )
    if served_exact_prefix is not None:
        checks.append(
            GateCheck(
                name="exact-prefix",
                passed=exact_prefix <= served_exact_prefix,
                found=float(exact_prefix),
                limit=float(served_exact_prefix),
                domain=ALL,
            )
        )
    return Verdict(passed=all(check.passed for check in checks), checks=checks)


def rejudge(evidence: Evidence, manifest: Manifest | None = None, *, gate: Gate | None = None) -> Verdict:
    """Our verdict on an evidence record, whatever verdict it carries.

    With `manifest` the record must name its digest, and the exact prefix it was measured with must
    be one that the manifest asks for. Errors: `Corrupt` when the evidence is another mapper's.
    """
    if manifest is not None and evidence.mapper != manifest.digest:
        raise Corrupt(
            f"the evidence is for mapper {evidence.mapper[:12]}, not for {manifest.digest[:12]}",
            "evaluate this mapper: kvhub eval MAPPER --text FILE",
        )
    return judge(
        evidence.scores,
        injection_error=evidence.injection_max_logit_error,
        exact_prefix=evidence.exact_prefix,
        served_exact_prefix=None if manifest is None else manifest.exact_prefix,
        gate=gate,
    )


def reason(verdict: Verdict) -> str:
    """One line for listings: that it passed, or the first condition that failed."""
    for check in verdict.checks:
        if not check.passed:
            return f"gate: {check.name} {check.found:.3g} (limit {check.limit:g}) on {check.domain}"
    return "gate passed"


def _excess(table: dict[tuple[str, Arm, str], Score], domain: str) -> float | None:
    """Recomputed from the two NLLs, so that a record cannot state another."""
    mapped, native = table.get(("nll", "mapped", domain)), table.get(("nll", "native", domain))
    return None if mapped is None or native is None else mapped.value - native.value


def _missing(name: str, domain: str, limit: float) -> GateCheck:
    """A condition without its score fails; `found` cannot say more than zero."""
    return GateCheck(name=f"{name}-missing", passed=False, found=0.0, limit=limit, domain=domain)
