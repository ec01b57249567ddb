import pytest
from pydantic import ValidationError
from support.eval_pair import manifest, tiny

from kvhub.errors import Corrupt
from kvhub.evaluation.evidence import Evidence, Score, Verdict
from kvhub.evaluation.gate import Gate, judge, rejudge


def scores(domain, *, mapped=2.1, native=2.0, source=2.5, empty=3.0, wrong=3.1, top1=0.9, n=400):
    arms = {"mapped": mapped, "native": native, "source": source, "empty": empty, "wrong-document": wrong}
    found = [
        Score(metric="nll", arm=arm, domain=domain, value=value, low=value, high=value, n=n)
        for arm, value in arms.items()
    ]
    return [*found, Score(metric="top1", arm="mapped", domain=domain, value=top1, low=top1, high=top1, n=n)]


def decide(*domains, exact_prefix=0, served=0, injection=1e-4, gate=None):
    return judge(
        [score for domain in domains for score in domain],
        injection_error=injection,
        exact_prefix=exact_prefix,
        served_exact_prefix=served,
        gate=gate,
    )


def failed(verdict):
    return {check.name: check for check in verdict.checks if not check.passed}


def test_good_scores_pass_and_the_limits_are_recorded():
    verdict = decide(scores("wiki"), scores("code"), scores("all"))
    assert verdict.passed
    assert {c.name: c.limit for c in verdict.checks} == {
        "positions": 384,
        "top1": 0.80,
        "excess-nll": 0.25,
        "better-than-source": 0,
        "better-than-empty": 0,
        "better-than-wrong-document": 0,
        "injection": 0.5,
        "exact-prefix": 0,
    }


@pytest.mark.parametrize(
    ("bad", "check", "found"),
    [
        ({"n": 383}, "positions", 383),
        ({"top1": 0.79}, "top1", 0.79),
        ({"mapped": 2.3}, "excess-nll", 0.3),
        ({"source": 2.1}, "better-than-source", 0.0),
        ({"empty": 2.05}, "better-than-empty", -0.05),
        ({"wrong": 2.05}, "better-than-wrong-document", -0.05),
    ],
)
def test_one_bad_domain_fails_whatever_the_mean_says(bad, check, found):
    verdict = decide(scores("wiki"), scores("code", **bad), scores("all"))
    assert not verdict.passed
    assert list(failed(verdict)) == [check]
    assert failed(verdict)[check].domain == "code"
    assert failed(verdict)[check].found == pytest.approx(found)


def test_the_pooled_scores_alone_never_pass():
    assert not decide(scores("all")).passed
    assert not decide().passed


def test_a_missing_score_fails():
    without = [s for s in scores("code") if s.metric != "top1"]
    assert set(failed(decide(scores("wiki"), without, scores("all")))) == {"top1-missing"}


def test_r2_takes_no_part():
    bad = Score(metric="r2_key", arm="mapped", domain="wiki", value=-50.0, low=-60.0, high=-40.0, n=9)
    assert decide(scores("wiki"), scores("all"), [bad]).passed


def test_a_step_down_to_a_weaker_target_need_not_beat_the_source():
    weaker = {"source": 1.8}
    verdict = decide(scores("wiki", **weaker), scores("all", **weaker))
    assert verdict.passed
    (check,) = [c for c in verdict.checks if c.name == "source-is-stronger"]
    assert check.found == pytest.approx(0.2)
    # but everything else still binds
    assert not decide(scores("wiki", **weaker, mapped=2.3), scores("all", **weaker)).passed


def test_more_exact_rows_than_are_served_flatter_and_fail():
    assert set(failed(decide(scores("wiki"), scores("all"), exact_prefix=4))) == {"exact-prefix"}
    assert decide(scores("wiki"), scores("all"), exact_prefix=4, served=4).passed


def test_thresholds_can_be_stricter():
    strict = Gate(min_top1=0.95)
    assert failed(decide(scores("wiki"), scores("all"), gate=strict))["top1"].limit == 0.95


def evidence(digest, found, **changes):
    fields = {
        "mapper": digest,
        "kvhub_version": "0",
        "created": "2026-01-01T00:00:00Z",
        "protocol": "test",
        "text": "0" * 64,
        "windows": 10,
        "exact_prefix": 0,
        "injection_max_logit_error": 1e-4,
        "scores": found,
        "verdict": Verdict(passed=True, checks=[]),
    }
    return Evidence(**{**fields, **changes})


def test_a_claimed_verdict_is_not_believed():
    boasting = evidence("a" * 64, [*scores("wiki", top1=0.1), *scores("all")])
    assert boasting.verdict.passed
    assert not rejudge(boasting).passed
    good = Evidence.model_validate_json(evidence("a" * 64, [*scores("wiki"), *scores("all")]).to_bytes())
    assert rejudge(good).passed
    assert not rejudge(evidence("a" * 64, good.scores, injection_max_logit_error=50.0)).passed


def test_a_stated_excess_is_recomputed():
    lie = Score(metric="excess_nll", arm="mapped", domain="wiki", value=0.0, low=0.0, high=0.0, n=400)
    verdict = rejudge(evidence("a" * 64, [lie, *scores("wiki", mapped=2.4), *scores("all")]))
    assert set(failed(verdict)) == {"excess-nll"}


def test_a_score_given_twice_is_refused():
    with pytest.raises(ValidationError, match="twice"):
        evidence("a" * 64, [*scores("wiki"), *scores("wiki", top1=0.1)])


def test_evidence_of_another_mapper_is_refused():
    model = tiny()
    described = manifest(model, model)
    found = [*scores("wiki"), *scores("all")]
    assert rejudge(evidence(described.digest, found), described).passed
    with pytest.raises(Corrupt, match="evidence is for mapper aaaaaaaaaaaa"):
        rejudge(evidence("a" * 64, found), described)
    assert not rejudge(evidence(described.digest, found, exact_prefix=8), described).passed
