"""One line of a study: a variant's scores on one domain, with intervals."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TextIO

from kvhub.evaluation.evidence import ALL
from kvhub.study.measure import ArmScores


@dataclass(frozen=True)
class Row:
    """NLL and KL in nat a token; intervals are 95 %, over whole windows."""

    pair: str
    study: str
    variant: str
    domain: str
    excess_nll: float
    low: float
    high: float
    kl: float
    top1: float
    cosine: float
    cosine_worst: float
    """Of the worst layer."""
    wrong_document: float
    """Excess NLL on another document's mapped cache."""
    source: float
    """Excess NLL of the source alone."""
    empty: float
    n: int
    """Scored positions."""


def rows_of(
    pair: str,
    study: str,
    variant: str,
    scores: ArmScores,
    fitted: Sequence[str],
    *,
    domains: bool = False,
    resamples: int = 2000,
) -> list[Row]:
    """The line of all windows of the texts in `fitted`, and one of the others', where there are any.

    domains: one for each text as well.
    """
    found = []
    for name, part in scores.parts(fitted, domains=domains).items():
        table = {(s.metric, s.arm): s for s in part.summary(resamples=resamples)[0] if s.domain == ALL}
        excess = table["excess_nll", "mapped"]
        found.append(
            Row(
                pair,
                study,
                variant,
                name,
                excess.value,
                excess.low,
                excess.high,
                table["kl", "mapped"].value,
                table["top1", "mapped"].value,
                table["attention_cosine", "mapped"].value,
                table["attention_cosine_worst", "mapped"].value,
                table["excess_nll", "wrong-document"].value,
                table["excess_nll", "source"].value,
                table["excess_nll", "empty"].value,
                excess.n,
            )
        )
    return found


COLUMNS = tuple(field.name for field in fields(Row))


def shown(value: object) -> str:
    """A cell: four decimals."""
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def write_csv(rows: Iterable[Row], out: TextIO) -> None:
    """A header and one line a row."""
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    for row in rows:
        table.writerow([shown(getattr(row, name)) for name in COLUMNS])
