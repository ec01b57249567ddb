"""`benchmarks/fidelity.py` on a tiny pair: the same numbers twice, and lines that are replaced."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support.prose import write_text
from support.tiny import make_tiny

ROOT = Path(__file__).resolve().parents[2]
RECIPES = "paper,head-local,off-head-10,first-4-exact,closed-form"


def test_the_same_lines_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import fidelity

    one, two = make_tiny(tmp_path / "one", layers=3), make_tiny(tmp_path / "two", layers=2, seed=1)
    texts = [write_text(tmp_path / f"{name}.txt", 150, seed=seed) for seed, name in enumerate("abc")]

    def lines(name: str, *more: str) -> list[dict[str, str]]:
        output = tmp_path / name
        fidelity.main([
            str(one), str(two), "--text", str(texts[0]), "--text", str(texts[1]), "--other", str(texts[2]),
            "--captures", str(tmp_path / "captures"), "--name", "A->B", "--both", "--recipes", RECIPES,
            "--default", "closed-form", "--k", "1", "--sequences", "12", "--length", "64", "--windows", "4",
            "--prefix", "40", "--tail", "12", "--dtype", "float32", "--output", str(output), *more,
        ])  # fmt: skip
        with output.open(newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file))
        assert "torch" in output.with_suffix(".json").read_text()
        for line in found:
            line["fit_seconds"] = ""
        return found

    first = lines("one.csv")
    assert lines("two.csv") == first
    assert lines("one.csv") == first  # replaced, not added
    keys = {(line["pair"], line["recipe"], line["domain"]) for line in first}
    assert len(keys) == len(first) == 2 * 6 * 5  # pairs, recipes with default, all a b c other
    by = {(line["pair"], line["recipe"], line["domain"]): line for line in first}
    assert by["A->B", "default", "all"]["excess_nll"] == by["A->B", "closed-form", "all"]["excess_nll"]
    assert by["A->B", "paper", "all"]["removed"] == "0"
    paper, local = (int(by["A->B", name, "all"]["apply_flops"]) for name in ("paper", "head-local"))
    assert local == paper  # twice the layers, half the heads
