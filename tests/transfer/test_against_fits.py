"""`benchmarks/transfer.py`: what is compared with what, on lines made by hand."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvhub.transfer.advise import advise
from kvhub.transfer.probe import Outcome, Probe

ROOT = Path(__file__).resolve().parents[2]
FITS = {
    name: {"kl": kl, "excess_nll": kl, "empty": 1.0, "empty_kl": 2.0, "k": k, "top1": 0.5}
    for name, kl, k in (("paper-k1", 0.4, 1.0), ("ridge", 0.2, 4.0), ("ridge-all", 0.1, 9.0),
                        ("head-local", 0.3, 8.0), ("default", 0.05, 4.0))
}  # fmt: skip


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import transfer

    return transfer


def outcome(k: int, support: Any, kl: float) -> Outcome:
    return Outcome(k, support, 0.9, 0.1, kl, 0.1, 0.9, 0.5, 1.0)


def probe() -> Probe:
    tried = [outcome(1, "full", 0.9), outcome(4, "full", 0.5), outcome(9, "full", 0.6),
             outcome(8, "head-local", 0.7)]  # fmt: skip
    return Probe(tried, 1.0, 100, [[0.1, 0.5], [0.3, 0.2]])


def test_a_line_sets_what_was_said_beside_what_came(transfer: Any) -> None:
    line = transfer.line_of("a->b", advise(probe(), 2), FITS, 1.5)
    assert (line["advised"], line["best"], line["k"]) == ("ridge", "ridge-all", 4)
    assert line["context_kept"] == pytest.approx(0.5) and line["ridge_kept"] == pytest.approx(0.9)
    assert line["default_kept"] == pytest.approx(0.975) and line["best_r2"] == pytest.approx(0.4)
    # said: 0.9, 0.5, 0.6, 0.7; came: 0.4, 0.2, 0.1, 0.3
    assert line["within"] == pytest.approx(0.8)
    assert set(line) == set(transfer.COLUMNS)
    assert transfer.nearest(6, "head-local", FITS) == "head-local"
    assert transfer.nearest(1, "full", FITS) == "paper-k1"


def test_the_summary_draws_whole_pairs(transfer: Any, tmp_path: Path) -> None:
    path = tmp_path / "transfer.csv"
    one = transfer.line_of("a->b", advise(probe(), 2), FITS, 1.5)
    for number, name in enumerate(("a->b", "b->a", "a->c", "c->a", "d->a")):
        for again in range(2):  # replaced, not added
            line = one | {"pair": name, "context_kept": 0.1 * number, "ridge_kept": 0.05 * number + again}
            transfer.keep(path, line | {"ridge_kl": 0.3 - 0.05 * number})
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["pair"] for line in lines] == ["a->b", "b->a", "a->c", "c->a", "d->a"]
    assert [len(group) for group in transfer.clusters(lines)] == [2, 2, 1]
    transfer.summary(path)
    found = json.loads(path.with_suffix(".json").read_bytes())["rank_correlation"]
    said = found["context_kept, ridge_kept"]
    assert (said["spearman"], said["directions"], said["pairs"]) == (pytest.approx(1), 5, 3)
    assert found["context_kept, ridge_kl"]["spearman"] == pytest.approx(1)  # +1 is a perfect predictor
    assert np.isfinite(said["low"]) and said["low"] <= said["high"]
