"""`benchmarks/fidelity.py` on a tiny pair: the same numbers twice, and lines that are replaced."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from support.prose import write_text
from support.tiny import make_tiny

from kvhub.errors import BadInput
from kvhub.fit.solve import Solved
from kvhub.model.identity import Geometry
from kvhub.study.pair import StudyPair
from kvhub.study.recipes import Recipe, named

ROOT = Path(__file__).resolve().parents[2]
RECIPES = "paper,head-local,off-head-10,first-4-exact,closed-form,default-stretched,default,best"


def test_the_same_lines_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import fidelity

    two_layers, head_dim = 2, 16
    one = make_tiny(tmp_path / "one", layers=3)
    two = make_tiny(tmp_path / "two", layers=two_layers, head_dim=head_dim, seed=1)
    texts = [write_text(tmp_path / f"{name}.txt", 150, seed=seed) for seed, name in enumerate("abc")]

    fit, trained = fidelity.fit, set()

    def kept(pair: StudyPair, recipe: Recipe) -> tuple[Solved, float]:
        solved, seconds = fit(pair, recipe)
        if solved.training is not None:
            trained.add((recipe.name, solved.training.steps))
        return solved, seconds

    monkeypatch.setattr(fidelity, "fit", kept)

    def lines(name: str, recipes: str = RECIPES) -> list[dict[str, str]]:
        output = tmp_path / name
        fidelity.main([
            str(one), str(two), "--text", str(texts[0]), "--text", str(texts[1]), "--other", str(texts[2]),
            "--captures", str(tmp_path / "captures"), "--name", "A->B", "--both", "--recipes", recipes,
            "--k", "1", "--sequences", "12", "--length", "64", "--windows", "4", "--tuning", "2",
            "--prefix", "40", "--tail", "12", "--dtype", "float32", "--output", str(output),
        ])  # fmt: skip
        with output.open(newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file))
        beside = json.loads(output.with_suffix(".json").read_bytes())["pairs"]
        assert list(beside) == ["A->B", "B->A"] and "torch" in beside["A->B"]["machine"]["versions"]
        assert [text["fitted_on"] for text in beside["B->A"]["texts"]] == [True, True, False]
        assert beside["A->B"]["source"] == beside["B->A"]["target"]
        for line in found:
            line["fit_seconds"] = ""
        return found

    first = lines("one.csv")
    assert lines("two.csv") == first
    again = lines("one.csv", "paper,closed-form")  # replaced, not added
    assert sorted(again, key=str) == sorted(first, key=str)
    assert trained == {("default", 60), ("default-stretched", 60), ("best", 60)}
    keys = {(line["pair"], line["recipe"], line["domain"]) for line in first}
    assert len(keys) == len(first) == 2 * 8 * 5  # pairs, recipes with default, all a b c other
    assert all(line["empty_kl"] and line["native_nll"] and line["wrong_document"] for line in first)
    by = {(line["pair"], line["recipe"], line["domain"]): line for line in first}
    names = "closed-form", "default-stretched", "default"
    closed, steps, default = (by["A->B", name, "all"] for name in names)
    assert int(by["A->B", "best", "all"]["apply_flops"]) <= int(closed["apply_flops"])
    # gradient steps cost nothing to apply, and the norm its weights
    assert all(closed[name] == steps[name] for name in ("k", "bytes", "apply_flops", "native_nll"))
    assert default["apply_flops"] == closed["apply_flops"] and default["kl"] != steps["kl"]
    assert int(default["bytes"]) == int(closed["bytes"]) + two_layers * head_dim * 4
    assert by["A->B", "paper", "all"]["removed"] == "0"
    paper, local = (int(by["A->B", name, "all"]["apply_flops"]) for name in ("paper", "head-local"))
    assert local == paper  # twice the layers, half the heads


def test_recipes_of_more_layers_are_known_by_name() -> None:
    source = Geometry(
        num_layers=24, num_attention_heads=14, num_kv_heads=2, head_dim=64, hidden_size=896, k_norm=False
    )
    assert named("ridge-k12-1e-4").count(8, source) == 12
    assert named("first-4-exact-all").count(8, source) == 24
    with pytest.raises(BadInput, match="no recipe"):
        named("ridge-k13")
