"""k and lambda chosen on text that is neither fitted on nor held out."""

from __future__ import annotations

from contextlib import nullcontext
from math import log10
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fitting import Pair
from support.prose import write_text
from support.shapes import shape
from support.tiny import make_tiny

from kvhub.artifact.manifest import CurvePoint, Manifest
from kvhub.artifact.read import verify_artifact
from kvhub.artifact.write import write_artifact
from kvhub.cli import run
from kvhub.errors import BadInput
from kvhub.fit import study
from kvhub.fit.calibration import CalibrationSet, calibration_set, load_corpora
from kvhub.fit.ridge import PAPER
from kvhub.fit.run import fit_pair
from kvhub.fit.selection import demand_k
from kvhub.fit.settings import GRID_LAMBDA, FitSettings, parse_k
from kvhub.fit.study import choose, smallest
from kvhub.mapper import Mapper
from kvhub.model.identity import Geometry
from kvhub.model.load import LoadedModel, load_model

LENGTH = 64


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, LoadedModel, CalibrationSet]:
    root = tmp_path_factory.mktemp("study")
    one = load_model(make_tiny(root / "one", layers=5), torch.float32)
    two = load_model(make_tiny(root / "two", layers=3, head_dim=24, seed=1), torch.float32)
    corpora = load_corpora([write_text(root / "text.txt", 400)])
    return one, two, calibration_set(corpora, one.tokenizer, sequences=24, length=LENGTH, tuning=True)


def settings(**changes: object) -> FitSettings:
    given = {"sequences": 24, "length": LENGTH, "stride": 2, "store_dtype": "float32"}
    return FitSettings(**(given | {"created": "2026-01-01T00:00:00+00:00"} | changes))  # type: ignore[arg-type]


def test_tuning_text_is_on_no_other_side(pair: tuple[LoadedModel, LoadedModel, CalibrationSet]) -> None:
    one, _, windows = pair
    assert len(windows.tuning) == 12 and windows.tuning.shape[1] == LENGTH

    def sentences(rows: torch.Tensor | list[torch.Tensor]) -> set[str]:
        text = "".join(one.tokenizer.decode(row.tolist()) for row in rows)
        return {part.strip() for part in text.split(".") if len(part) > 100}

    sides = [sentences(side) for side in (windows.fit, windows.tuning, windows.held_out)]
    assert all(sides)
    assert not (sides[0] & sides[1] or sides[0] & sides[2] or sides[1] & sides[2])


def test_the_curve_is_what_the_mappers_do(
    pair: tuple[LoadedModel, LoadedModel, CalibrationSet], tmp_path: Path
) -> None:
    one, two, windows = pair
    (fitted,) = fit_pair(one, two, windows, settings(k="auto", regularization="auto"))
    selection = fitted.manifest.selection
    assert selection is not None
    # The grid, all five layers at its end (k = 5 has too few rows for 160 features in no case here).
    assert [p.k for p in selection.curve[:4]] == [1, 2, 4, 5]
    assert {p.regularization for p in selection.curve if p.k == selection.k} == set(GRID_LAMBDA)
    assert len(selection.curve) == 4 + len(GRID_LAMBDA) - 1
    assert (selection.windows, selection.tail) == (12, 16)
    assert (fitted.manifest.k, fitted.manifest.regularization) == (selection.k, selection.regularization)
    best = min((p for p in selection.curve if p.k == selection.k), key=lambda p: p.kl)
    assert best.regularization == selection.regularization

    # One point again, through an artifact and the public mapper.
    point = selection.curve[1]
    (alone,) = fit_pair(one, two, windows, settings(k=2))
    assert alone.manifest.selection is None and b"selection" not in alone.manifest.to_bytes()
    write_artifact(tmp_path / "mapper", alone.manifest, alone.tensors)
    mapper = Mapper.from_pretrained(tmp_path / "mapper")
    kl = agree = count = 0.0
    split = LENGTH - 16
    with torch.inference_mode():
        for window in windows.tuning:
            native = two.model(window[None, :-1]).logits[0, split:].double().log_softmax(-1)
            cache = one.model(window[None, :split], use_cache=True).past_key_values
            cache = mapper.map(cache, source=one, target=two)
            mapped = two.model(window[None, split:-1], past_key_values=cache).logits[0]
            mapped = mapped.double().log_softmax(-1)
            kl += float((native.exp() * (native - mapped)).sum())
            agree += float((native.argmax(-1) == mapped.argmax(-1)).sum())
            count += len(native)
    assert point.kl == pytest.approx(kl / count, rel=1e-3)
    assert point.top1 == pytest.approx(agree / count, abs=0.02)
    assert 0 < point.attention_cosine_worst <= point.attention_cosine < 1


def test_k_is_chosen_per_direction_and_paper_lambda_stays(
    pair: tuple[LoadedModel, LoadedModel, CalibrationSet],
) -> None:
    one, two, windows = pair
    there, back = fit_pair(one, two, windows, settings(k="auto", regularization=PAPER), both=True)
    for fitted, layers in ((there, 5), (back, 3)):
        assert fitted.manifest.selection is not None
        assert fitted.manifest.selection.curve[-1].k == layers
        assert fitted.manifest.regularization_convention == "absolute-mean"
        assert {p.regularization for p in fitted.manifest.selection.curve} == {0.01}
    again = Manifest.model_validate_json(there.manifest.to_bytes())
    assert again == there.manifest and again.digest == there.manifest.digest


def point(k: int, kl: float, cosine: float = 0.9) -> CurvePoint:
    return CurvePoint(
        k=k, regularization=1e-3, attention_cosine=cosine, attention_cosine_worst=0.5, kl=kl, top1=0.5
    )


@pytest.mark.parametrize(
    ("curve", "k"),
    [
        ([point(1, 1.0), point(8, 0.5), point(12, 0.4)], 12),
        ([point(1, 1.0), point(8, 0.402), point(12, 0.4)], 8),  # as good, and a third fewer layers
        ([point(1, 1.0), point(8, 0.402, 0.89), point(12, 0.4)], 12),  # but not with a worse cosine
        ([point(1, 0.3), point(2, 0.31), point(4, 0.5)], 1),  # more layers may be worse
    ],
)
def test_the_smallest_k_that_is_as_good_as_the_best(curve: list[CurvePoint], k: int) -> None:
    assert smallest(curve).k == k


@pytest.mark.parametrize("strength", GRID_LAMBDA)
@pytest.mark.parametrize("k", [1, 4, 7])
def test_the_best_of_each_curve_is_chosen_wherever_it_lies(
    monkeypatch: pytest.MonkeyPatch, k: int, strength: float
) -> None:
    """On curves that are made up: of tiny models the best one is at the same end each time."""
    tried: list[tuple[int, float]] = []
    slope = 1.0

    def solve(*given: Any) -> tuple[int, float]:
        return len(given[3][0]), given[4].value

    def measure(solved: tuple[int, float], *rest: object) -> CurvePoint:
        tried.append(solved)
        kl = 1 + slope * abs(solved[0] - k) + abs(log10(solved[1] / strength))
        return point(solved[0], kl).model_copy(update={"regularization": solved[1]})

    monkeypatch.setattr(study, "solve_pair", solve)
    monkeypatch.setattr(study, "_measure", measure)
    monkeypatch.setattr(study, "_window", lambda *given: None)
    side: Any = SimpleNamespace(identity=SimpleNamespace(geometry=shape(7, 2, 4)), live=nullcontext)
    moments: Any = SimpleNamespace(key=SimpleNamespace(n=1000))
    windows, scores = torch.zeros((3, LENGTH), dtype=torch.int64), torch.rand(7, 7)

    def chosen(**changes: object) -> tuple[int, float]:
        tried.clear()
        found = choose(moments, scores, side, side, windows, settings(**changes), None, lambda *step: None)
        assert [(p.k, p.regularization) for p in found.curve] == tried
        return found.k, found.regularization

    assert chosen(k="auto", regularization="auto") == (k, strength)
    assert tried[:5] == [(n, 1e-3) for n in (1, 2, 4, 6, 7)]
    assert sorted(tried[5:]) == [(k, value) for value in GRID_LAMBDA if value != 1e-3]
    assert chosen(k="auto", regularization=PAPER) == (k, 0.01) and len(tried) == 5
    assert chosen(k=2, regularization="auto") == (2, strength) and len(tried) == 6
    slope = 0.001  # all k are near the best: the smallest stays chosen, whatever another had with 1e-3
    assert chosen(k="auto", regularization=PAPER) == (1, 0.01)
    assert chosen(k="auto", regularization="auto") == (1, strength)


def test_the_command_says_and_draws_what_it_chose(
    tmp_path: Path, kvhub_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = Pair.make(tmp_path, documents=400)
    assert run(pair.arguments("--k", "auto", "--low-memory")) == 0
    printed = capsys.readouterr()
    (directory,) = (kvhub_home / "mappers").iterdir()
    manifest = verify_artifact(directory, deep=True)
    assert manifest.selection is not None and manifest.k == manifest.selection.k
    assert (
        f"chosen   k {manifest.k}, lambda 0.001: KL" in printed.out and "choosing k and lambda" in printed.err
    )
    image = (directory / "assets" / "selection.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 5000
    assert run(pair.arguments("--k", "all")) == 0
    digests = (kvhub_home / "mappers").iterdir()
    assert 3 in {verify_artifact(directory, deep=True).k for directory in digests}


def test_too_little_text_to_choose_on_is_refused(tmp_path: Path) -> None:
    corpora = load_corpora([write_text(tmp_path / "a.txt", 60, words=12)])
    tokenizer = load_model(make_tiny(tmp_path / "m"), torch.float32).tokenizer
    calibration_set(corpora, tokenizer, sequences=4, length=90)
    with pytest.raises(BadInput, match="the tuning side of the text is shorter"):
        calibration_set(corpora, tokenizer, sequences=4, length=400, tuning=True)
    with pytest.raises(BadInput, match="--k some is neither"):
        parse_k("some")


def test_a_k_of_thousands_of_digits_is_not_repeated() -> None:
    shape = Geometry(
        num_layers=3, num_attention_heads=4, num_kv_heads=2, head_dim=16, hidden_size=48, k_norm=True
    )
    for refuse in (lambda: parse_k("9" * 5000), lambda: demand_k(int("9" * 4000), shape)):
        with pytest.raises(BadInput) as caught:
            refuse()
        assert len(caught.value.message) < 100
