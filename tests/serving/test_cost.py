"""The cost model against costs that are known, and against files that are not its own."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import pytest

from kvhub.serving.cost import MARGIN, CostModel

M, N = "a" * 64, "b" * 64


def true_prefill(tokens: int, context: float) -> float:
    return 3.0 + 0.4 * tokens + 0.0002 * tokens * (context + tokens / 2)


def learnt(noise: float = 0.0, *, count: int = 60, seed: int = 1) -> CostModel:
    """A model that saw a server on which mapping a token costs 0.1 ms and a block 0.5 ms to stage."""
    draw = random.Random(seed)
    model = CostModel()
    for _ in range(count):
        tokens, context = draw.randrange(8, 1500), draw.randrange(0, 3000)
        model.observe_prefill(tokens, context, true_prefill(tokens, context) * (1 + draw.gauss(0, noise)))
        mapped = draw.randrange(64, 2000)
        model.observe_map(M, mapped, (5 + 0.1 * mapped) * (1 + draw.gauss(0, noise)))
        model.observe_stage(mapped // 64, 1 + 0.5 * (mapped // 64))
    return model


@pytest.mark.parametrize(("noise", "error"), [(0.0, 1e-3), (0.1, 0.15)])
def test_costs_are_learnt(noise: float, error: float) -> None:
    model = learnt(noise)
    for tokens, context in ((100, 0), (1000, 0), (1000, 2000), (50, 3000)):
        assert model.prefill_ms(tokens, context) == pytest.approx(true_prefill(tokens, context), rel=error)
    assert model.map_ms(M, 512) == pytest.approx(5 + 51.2, rel=error)
    assert model.stage_ms(8) == pytest.approx(5, rel=max(error, 0.02))


def test_nothing_is_known_before_it_was_measured() -> None:
    model = CostModel()
    assert model.prefill_ms(100, 0) is None and model.map_ms(M, 64) is None
    verdict = model.judge(prompt=500, held=0, reach=448, mapped={M: 448}, blocks=7)
    assert not verdict.worth and verdict.compute_ms is None
    for _ in range(10):
        model.observe_prefill(7, 0, 5.0)  # the warm-up of a server says nothing of long prompts
    assert model.prefill_ms(1000, 0) is None
    verdict = learnt().judge(prompt=500, held=0, reach=448, mapped={N: 448}, blocks=7)
    assert not verdict.worth and "not measured" in verdict.reason


@pytest.mark.parametrize("prompt", [128, 512, 2048])
@pytest.mark.parametrize("held", [0, 64])
@pytest.mark.parametrize("per_token", [0.02, 0.2, 0.39, 1.0])
def test_the_verdict_is_the_comparison(prompt: int, held: int, per_token: float) -> None:
    model = learnt()
    for tokens in (64, 256, 1024, 64, 256, 1024):
        model.observe_map(N, tokens, 1 + per_token * tokens)
    reach = prompt // 64 * 64 - 64
    tokens = reach - held
    verdict = model.judge(prompt=prompt, held=held, reach=reach, mapped={N: tokens}, blocks=tokens // 64)
    reuse = 1 + per_token * tokens + 1 + 0.5 * (tokens // 64) + true_prefill(prompt - reach, reach)
    compute = true_prefill(prompt - held, held)
    assert verdict.reuse_ms == pytest.approx(reuse, rel=0.05)
    assert verdict.compute_ms == pytest.approx(compute, rel=0.05)
    if abs(reuse * MARGIN / compute - 1) > 0.1:
        assert verdict.worth == (reuse * MARGIN < compute)


def test_it_follows_a_change_of_load() -> None:
    model = learnt()
    before = model.prefill_ms(500, 0)
    for _ in range(200):
        model.observe_prefill(500, 0, 2 * true_prefill(500, 0))
    after = model.prefill_ms(500, 0)
    assert before is not None and after is not None and after == pytest.approx(2 * before, rel=0.1)


def test_lengths_never_seen_are_taken_for_cheap() -> None:
    """A long prompt is not promised a gain that was extrapolated from short ones."""
    model = CostModel()
    for tokens in (32, 64, 128) * 5:
        model.observe_prefill(tokens, 0, 1.0 + 0.5 * tokens)
    assert model.prefill_ms(10_000, 0) == pytest.approx(1 + 0.5 * 512, rel=0.05)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_impossible_times_are_not_learnt(bad: float) -> None:
    model = learnt()
    before = model.prefill_ms(100, 0)
    model.observe_prefill(100, 0, bad)
    model.observe_map(M, 100, bad)
    assert model.prefill_ms(100, 0) == before


def test_a_file_brings_it_back(tmp_path: Path) -> None:
    model, path = learnt(), tmp_path / "deep" / "cost.json"
    model.save(path)
    again = CostModel.load(path)
    assert again.terms() == model.terms() and again.prefill_ms(300, 10) == model.prefill_ms(300, 10)
    assert [p.name for p in path.parent.iterdir()] == ["cost.json"]


GOOD = {"count": 1, "longest": 1.0, "gram": [[1.0, 0.0], [0.0, 1.0]], "moment": [1.0, 1.0]}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "not json",
        json.dumps({"prefill": GOOD, "stage": GOOD, "maps": {}}),
        json.dumps({"prefill": 3, "stage": GOOD, "maps": {}}),
        json.dumps({"prefill": GOOD, "stage": {**GOOD, "moment": [1.0, None]}, "maps": {}}),
        '{"prefill": {"gram": [[NaN]]}}',
    ],
)
def test_another_file_is_no_model(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(content)
    assert CostModel.load(path).terms() == {}


def test_several_threads(tmp_path: Path) -> None:
    model = CostModel()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(300):
            tokens = draw.randrange(64, 500)
            model.observe_prefill(tokens, 0, true_prefill(tokens, 0))
            model.observe_map(M, tokens, 0.1 * tokens)
            model.judge(prompt=600, held=0, reach=512, mapped={M: 512}, blocks=8)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.prefill_ms(300, 0) == pytest.approx(true_prefill(300, 0), rel=0.05)
