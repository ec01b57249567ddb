"""The fits of `benchmarks/trial_fits.py` on a tiny pair, against loops; and the lines of `trials.py`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.prose import write_text
from support.tiny import make_tiny

from kvhub.fit.settings import FitSettings
from kvhub.model.load import load_model
from kvhub.study.pair import StudyPair, StudyText

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = FitSettings(k=1, sequences=4, length=64, stride=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trials")
    make_tiny(root / "one", layers=2)
    make_tiny(root / "two", layers=2, seed=1)
    for number, name in enumerate("ab"):
        write_text(root / f"{name}.txt", 150, seed=number)
    return root


@pytest.fixture(scope="module")
def known(root: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from benchmarks import trial_fits
    one, two = (load_model(root / name, torch.float32) for name in ("one", "two"))
    text = StudyText.cut(
        [root / "a.txt", root / "b.txt"], one.tokenizer, SETTINGS, windows=4, prefix=40, tail=12
    )
    pair = StudyPair(one, two, text, SETTINGS, root / "captures")
    with torch.inference_mode():
        return trial_fits.Together.of(pair)


def test_sensitivities_are_the_papers(known: Any) -> None:
    heads, layer = 2, 1
    found = known._sensitivity("k", layer, width=8)
    raw = np.zeros(found.shape)
    at = 0
    for attention, sizes in zip(known.attention, known.queries, strict=True):
        a = attention[layer].double().numpy()  # [query heads, boundaries, tokens]
        v = known.target["v"][at : at + a.shape[2], layer].double().numpy()
        for boundary in range(a.shape[1]):
            r = np.zeros((a.shape[2], heads))
            for u in range(a.shape[0]):
                h = u * heads // a.shape[0]
                o = a[u, boundary] @ v[:, h]
                apart = ((v[:, h] - o) ** 2).sum(1)
                r[:, h] += a[u, boundary] ** 2 * apart * float(sizes[layer, u, boundary])
            raw[at : at + len(r)] += r / r.sum(0)
        at += a.shape[2]
    raw /= raw.mean(0)
    alpha = np.minimum(1, np.sqrt((len(raw) / 16 - 1) / raw.var(0)))
    np.testing.assert_allclose(found.numpy(), 1 + alpha * (raw - 1), rtol=2e-3, atol=2e-3)
    weights = found.double()
    assert bool((weights.sum(0) ** 2 / weights.square().sum(0) >= 16 - 1e-6).all())


def test_weights_and_pools_at_their_ends(known: Any) -> None:
    with torch.inference_mode():
        plain = known.plain("v")
        even = known.solve("v", known.target["v"], [torch.ones(len(known.counts), 2)] * 2, local=False)
        anchored = known.pooled(1e6)
        drawn = known.pooled(1.0)
    for one, same, near, far in zip(plain.sides, even.sides, anchored.sides, drawn.sides, strict=True):
        torch.testing.assert_close(same.weight, one.weight)
        torch.testing.assert_close(near.weight, one.weight, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(far.weight, one.weight, rtol=1e-2, atol=1e-2)


def test_pooled_errors_are_what_falls(known: Any) -> None:
    with torch.inference_mode():
        sides = known.plain("v").sides[0], known.pooled(0.03).sides[0]
        errors = []
        for side in sides:
            mapped = side(known.source["v"][:, side.layers].float())
            error = mapped - known.target["v"][:, 0].float()
            pooled = [known._pool(0, h, error[:, h], error[:, h])[0].square().sum() for h in range(2)]
            errors.append(float(sum(pooled)))
    assert errors[1] < errors[0]


def test_keys_before_the_norm_become_those_after_it(known: Any) -> None:
    for layer, norm in enumerate(known.norms):
        raw = known.raw[:, layer].float()
        after = norm * raw / raw.square().mean(-1, keepdim=True).add(1e-6).sqrt()
        torch.testing.assert_close(after, known.target["k"][:, layer].float(), rtol=1e-3, atol=1e-3)


def test_a_line_for_each_trial(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import trials

    output = root / "trials.csv"
    for _ in range(2):  # replaced, not added
        trials.main([
            str(root / "one"), str(root / "two"), "--text", str(root / "a.txt"), "--text",
            str(root / "b.txt"), "--captures", str(root / "captures"), "--name", "A->B", "--k", "1",
            "--only", "k-norm,own-layers,by-layer", "--sequences", "4", "--length", "64", "--tuning", "8",
            "--prefix", "40", "--tail", "12", "--dtype", "float32", "--output", str(output),
        ])  # fmt: skip
    with output.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [line["pair"] for line in lines] == ["A->B"] * 5
    assert lines[0]["trial"] == "closed-form" and float(lines[0]["kl_change"]) == 0
    assert all(float(line["kl_low"]) <= float(line["kl_change"]) <= float(line["kl_high"]) for line in lines)
    assert {line["windows"] for line in lines} == {"4"}
