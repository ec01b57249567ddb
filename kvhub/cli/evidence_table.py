"""Evidence for people: arms by metrics, the mapped arm by text, the gate; each number with its interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import click

from kvhub.cli import output
from kvhub.cli.output import Column
from kvhub.evaluation.evidence import ALL, ARMS, Evidence, Score

_LIKELIHOOD = (("ppl_ratio", "PPL RATIO"), ("excess_nll", "EXCESS NLL"), ("kl", "KL"), ("top1", "TOP-1"))
_MAPPED = (
    *_LIKELIHOOD,
    ("gap_recovered", "GAP RECOVERED"),
    ("attention_cosine", "ATTENTION COSINE"),
    ("attention_cosine_worst", "WORST LAYER"),
    ("r2_key", "R2 KEYS"),
    ("r2_value", "R2 VALUES"),
)


def print_evidence(evidence: Evidence) -> None:
    """All of it on stdout."""
    for number, (columns, rows) in enumerate(_tables(evidence)):
        if number:
            click.echo()
        output.table(columns, rows)
    verdict = "passed the gate" if evidence.verdict.passed else "did not pass the gate"
    exact = f", first {evidence.exact_prefix} positions exact" if evidence.exact_prefix else ""
    click.echo()
    click.echo(
        output.clean(
            f"{evidence.mapper[:12]} {verdict}: {evidence.windows} windows, {evidence.protocol}{exact}; "
            f"injection error {evidence.injection_max_logit_error:.2g}; intervals 95 %"
        )
    )


def _tables(evidence: Evidence) -> Iterator[tuple[Sequence[Column], list[Mapping[str, str]]]]:
    arms: list[Mapping[str, str]] = []
    for arm in ARMS:
        nll = evidence.score("nll", arm)
        row = {"arm": arm, "ppl": "-" if nll is None else f"{math.exp(min(nll.value, 700)):.3f}"}
        arms.append(row | {metric: interval(evidence.score(metric, arm)) for metric, _ in _LIKELIHOOD})
    yield (
        [Column("arm", "ALL TEXT"), Column("ppl", "PPL", right=True, keep=1), *_columns(_LIKELIHOOD)],
        arms,
    )

    names = [*sorted({score.domain for score in evidence.scores} - {ALL}), ALL]
    texts: list[Mapping[str, str]] = []
    for metric, title in _MAPPED:
        found = {name: interval(evidence.score(metric, "mapped", name)) for name in names}
        texts.append({"mapped": title.lower()} | found)
    counts = {name: evidence.score("nll", "mapped", name) for name in names}
    texts.append(
        {"mapped": "positions"} | {name: "-" if s is None else str(s.n) for name, s in counts.items()}
    )
    yield [Column("mapped", "MAPPED"), *_columns([(name, name.upper()) for name in names])], texts

    gate: list[Mapping[str, str]] = [
        {
            "gate": check.name,
            "found": f"{check.found:.4g}",
            "limit": f"{check.limit:g}",
            "text": output.clean(check.domain),
            "result": "ok" if check.passed else "FAILS",
        }
        for check in evidence.verdict.checks
    ]
    right = [Column("found", "FOUND", right=True), Column("limit", "LIMIT", right=True)]
    yield [Column("gate", "GATE"), *right, Column("text", "WORST TEXT"), Column("result", "RESULT")], gate


def _columns(titles: Sequence[tuple[str, str]]) -> list[Column]:
    return [Column(key, output.clean(title), right=True, keep=1) for key, title in titles]


def interval(score: Score | None) -> str:
    """`0.812 [0.790, 0.833]`, or a dash where the score has no meaning."""
    return "-" if score is None else f"{score.value:.3f} [{score.low:.3f}, {score.high:.3f}]"
