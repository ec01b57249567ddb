"""An evaluation as text: arms by metrics, each number with its 95 % interval."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvhub.evaluation.evidence import ALL, Arm, Evidence, Score

if TYPE_CHECKING:
    from rich.console import RenderableType

ARMS: tuple[Arm, ...] = ("native", "source", "mapped", "empty", "wrong-document")
_LIKELIHOOD = (("ppl_ratio", "PPL ratio"), ("excess_nll", "excess NLL"), ("kl", "KL"), ("top1", "top-1"))
_MAPPED = (
    ("gap_recovered", "gap recovered"),
    ("attention_cosine", "attention cosine"),
    ("attention_cosine_worst", "worst layer"),
    ("r2_key", "R2 key"),
    ("r2_value", "R2 value"),
)


def tables(evidence: Evidence) -> list[RenderableType]:
    """Rich renderables: all arms, the mapped arm by text, the gate."""
    from rich.table import Table

    arms = Table("arm", "PPL", *(title for _, title in _LIKELIHOOD), title="all text", title_justify="left")
    for arm in ARMS:
        nll = evidence.score("nll", arm)
        arms.add_row(
            arm,
            "-" if nll is None else f"{math.exp(nll.value):.3f}",
            *(interval(evidence.score(metric, arm)) for metric, _ in _LIKELIHOOD),
        )

    domains = sorted({score.domain for score in evidence.scores} - {ALL})
    names = [*domains, ALL]
    texts = Table("mapped", *names, title="by text", title_justify="left")
    for metric, title in (*_LIKELIHOOD, *_MAPPED):
        texts.add_row(title, *(interval(evidence.score(metric, "mapped", name)) for name in names))
    counts = (evidence.score("nll", "mapped", name) for name in names)
    texts.add_row("positions", *("-" if score is None else str(score.n) for score in counts))

    gate = Table("gate", "found", "limit", "worst text", "", title_justify="left")
    for check in evidence.verdict.checks:
        gate.add_row(
            check.name,
            f"{check.found:.4g}",
            f"{check.limit:g}",
            check.domain,
            "ok" if check.passed else "FAILS",
        )
    return [arms, texts, gate]


def interval(score: Score | None) -> str:
    """`0.812 [0.790, 0.833]`, or a dash where the score has no meaning."""
    return "-" if score is None else f"{score.value:.3f} [{score.low:.3f}, {score.high:.3f}]"


def why(evidence: Evidence) -> str:
    """One line for the registry: passed, or the first condition that failed."""
    for check in evidence.verdict.checks:
        if not check.passed:
            return f"gate: {check.name} {check.found:.3g} (limit {check.limit:g}) on {check.domain}"
    return f"gate passed on {evidence.windows} windows"
