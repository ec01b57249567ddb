"""`benchmarks/mlp.py` on a tiny pair: networks in some layers and in all, each beside the ridge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.prose import write_text
from support.tiny import make_tiny

ROOT = Path(__file__).resolve().parents[2]


def test_both_families_on_the_same_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import machine, mlp

    for module in (machine, mlp):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    one = make_tiny(tmp_path / "one", layers=3)
    two = make_tiny(tmp_path / "two", layers=2, seed=1)
    text = write_text(tmp_path / "a.txt", 150)

    def found(*more: str) -> dict[str, Any]:
        mlp.main([
            str(one), str(two), "--text", str(text), "--captures", str(tmp_path / "cap"), "--name", "A->B",
            "--k", "1", "--sequences", "12", "--length", "64", "--windows", "2", "--tuning", "2",
            "--prefix", "40", "--tail", "12", "--dtype", "float32",
            "--hidden", "8,8", "--epochs", "2", "--batch", "64", *more,
        ])  # fmt: skip
        return json.loads((tmp_path / "mlp.json").read_bytes())

    some = found("--layers", "1", "--networks", "layer")["A->B, layers 1, 8,8 a layer"]
    assert some["steps"] == 2 * -(-some["rows"] // 64)
    assert some["networks"]["layers"] == [1]
    ours, ridge = some["mlp"], some["ridge"]
    assert ours["layers"].keys() == ridge["layers"].keys() == {"1"}
    assert ours["layers"] != ridge["layers"]
    both = found("--both")
    assert both.keys() == {
        "A->B, layers 1, 8,8 a layer", "A->B, all layers, 8,8 a head", "B->A, all layers, 8,8 a head",
    }  # fmt: skip
    assert both["A->B, layers 1, 8,8 a layer"] == some
    whole = both["A->B, all layers, 8,8 a head"]
    assert whole["ridge"]["excess_nll"] == ridge["excess_nll"]
    assert len(whole["mlp"]["layers"]) == 2
    difference = whole["mlp_minus_ridge"]["nll"]["value"]
    assert difference == pytest.approx(whole["mlp"]["excess_nll"] - ridge["excess_nll"], abs=1e-6)
