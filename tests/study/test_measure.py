"""A study's scores are those of `kvhub eval`, from recordings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.eval_pair import AffineMapper, sampled_windows, tiny

from kvhub.errors import Corrupt
from kvhub.evaluation.run import EvalSettings, evaluate
from kvhub.model.load import LoadedModel
from kvhub.study.bundle import Bundle
from kvhub.study.measure import ArmScores, MapperCandidate, cosines, measure
from kvhub.study.record import load, recording_path

TAIL = 9


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, LoadedModel, Bundle]:
    source, target = tiny(7), tiny(1)
    domains = {"one": sampled_windows(target, 4, 33, seed=1), "two": sampled_windows(target, 3, 33, seed=2)}
    bundle = Bundle.build(source, target, domains, tmp_path_factory.mktemp("bundle"), tail=TAIL)
    return source, target, bundle


@pytest.mark.parametrize("exact", [0, 3])
def test_the_same_scores_as_an_evaluation(pair: tuple[LoadedModel, LoadedModel, Bundle], exact: int) -> None:
    source, target, bundle = pair
    mapper = AffineMapper(source, target, 0.9, 0.1, exact_prefix=exact)
    settings = EvalSettings(tail=TAIL, resamples=50)
    expected = {
        (s.metric, s.arm, s.domain): s
        for s in evaluate(mapper, source, target, bundle.domains, settings).scores
    }
    scores, layers = measure(MapperCandidate(mapper), bundle, target, exact_prefix=exact).summary(
        resamples=50
    )
    assert {(s.metric, s.arm, s.domain) for s in scores} == set(expected)
    for score in scores:
        other = expected[score.metric, score.arm, score.domain]
        for name in ("value", "low", "high"):
            assert getattr(score, name) == pytest.approx(getattr(other, name), abs=2e-5), score
    assert len(layers) == 2


def test_back_from_the_same_recordings(pair: tuple[LoadedModel, LoadedModel, Bundle]) -> None:
    source, target, bundle = pair
    files = sorted(bundle.directory.rglob("*.safetensors"))
    back = bundle.reversed()
    found = measure(MapperCandidate(AffineMapper(target, source)), back, source, wrong=False)
    assert sorted(bundle.directory.rglob("*.safetensors")) == files
    expected = evaluate(
        AffineMapper(target, source), target, source, bundle.domains, EvalSettings(tail=TAIL, resamples=10)
    )
    score = expected.score("excess_nll")
    assert score is not None and found.excess() == pytest.approx(score.value, abs=2e-5)


def test_differences_are_paired(pair: tuple[LoadedModel, LoadedModel, Bundle]) -> None:
    source, target, bundle = pair

    def of(scale: float) -> ArmScores:
        return measure(MapperCandidate(AffineMapper(source, target, scale)), bundle, target, wrong=False)

    one, other = of(0.9), of(0.5)
    assert one.difference(one).high == 0 == one.difference(one).low
    found = one.difference(other)
    assert found.value == pytest.approx(one.mean() - other.mean())
    assert found.low <= found.value <= found.high
    share = one.share_removed(other)
    assert share.value == pytest.approx(1 - one.excess() / other.excess())


def test_cosines_need_no_forward(pair: tuple[LoadedModel, LoadedModel, Bundle]) -> None:
    source, target, bundle = pair
    candidate = MapperCandidate(AffineMapper(source, target, 0.9))
    found = cosines(candidate, bundle)
    expected = measure(candidate, bundle, target, wrong=False).cosine()
    assert found.shape == (7, 2, 4)
    assert found.mean((0, 2)) == pytest.approx(expected)


def test_a_damaged_recording_is_named(pair: tuple[LoadedModel, LoadedModel, Bundle], tmp_path: Path) -> None:
    _, target, bundle = pair
    path = recording_path(bundle.directory, target.identity.digest, bundle.domains["one"][0], TAIL)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Corrupt, match="no recording"):
        load(cut)
    assert torch.equal(load(path).window, bundle.domains["one"][0])
