import math

import pytest
import torch
from support.eval_pair import AffineMapper, RandomMapper, sampled_windows, tiny

from kvhub.errors import BadInput, Corrupt, Incompatible
from kvhub.evaluation.evidence import Evidence
from kvhub.evaluation.inject import KvRows, run
from kvhub.evaluation.run import EvalSettings, evaluate, evaluate_all, wrong_document_order

SETTINGS = EvalSettings(tail=9, resamples=200)
ARMS = ("native", "source", "mapped", "empty", "wrong-document")


@pytest.fixture(scope="module")
def model():
    return tiny(1)


@pytest.fixture(scope="module")
def domains(model):
    return {"one": sampled_windows(model, 5, 33, seed=1), "two": sampled_windows(model, 4, 33, seed=2)}


def value(evidence, metric, arm="mapped", domain="all"):
    score = evidence.score(metric, arm, domain)
    assert score is not None, (metric, arm, domain)
    return score.value


def test_identity_mapper_on_a_model_and_itself(model, domains):
    calls = []
    evidence = evaluate(
        AffineMapper(model, model), model, model, domains, SETTINGS, progress=lambda *at: calls.append(at)
    )
    assert calls == [(i, 9) for i in range(1, 10)]
    assert evidence.injection_max_logit_error < 1e-3
    assert value(evidence, "kl") == pytest.approx(0, abs=1e-6)
    assert value(evidence, "top1") == 1
    for metric in ("attention_cosine", "attention_cosine_worst", "r2_key", "r2_value", "ppl_ratio"):
        assert value(evidence, metric) == pytest.approx(1, abs=1e-4), metric
    assert value(evidence, "excess_nll") == pytest.approx(0, abs=1e-4)
    assert evidence.score("gap_recovered") is None  # source and target are one: no gap
    for arm in ("empty", "wrong-document"):
        assert value(evidence, "kl", arm) > 0.05, arm
        assert value(evidence, "nll", arm) > value(evidence, "nll"), arm
    assert len(evidence.layers) == 2
    assert len(evidence.layers[0].attention_cosine) == 4
    # all conditions but the number of positions (72 on each text at most)
    assert [c.name for c in evidence.verdict.checks if not c.passed] == ["positions"]
    assert Evidence.model_validate_json(evidence.to_bytes()) == evidence


def test_arms_against_plain_transformers(model, domains):
    """Every arm's NLL, computed again without any of the evaluation's code."""
    source = tiny(7)
    mapper = AffineMapper(source, model, 0.9, 0.1)
    windows, tail, prefix = domains["two"], 9, 24
    evidence = evaluate(mapper, source, model, {"two": windows}, SETTINGS)
    order = wrong_document_order(4)
    before = {index: order[at - 1] for at, index in enumerate(order)}

    def tail_nll(logits, window):
        return -logits.log_softmax(-1).gather(-1, window[prefix + 1 :, None]).mean()

    def mapped_rows(window):
        cache = source.model(input_ids=window[None, :prefix], use_cache=True).past_key_values
        cos, sin = source.model.model.rotary_emb(torch.zeros(1), torch.arange(prefix)[None])
        keys, values = [], []
        for layer in cache.layers:
            key = layer.keys[0].transpose(0, 1)
            first, second = key.chunk(2, -1)
            c, s = cos[0, :, None, :8], sin[0, :, None, :8]
            content = torch.cat((first * c + second * s, second * c - first * s), -1) * 0.9 + 0.1
            first, second = content.chunk(2, -1)
            keys.append(torch.cat((first * c - second * s, second * c + first * s), -1))
            values.append(layer.values[0].transpose(0, 1) * 0.9 + 0.1)
        return KvRows(tuple(keys), tuple(values))

    def on(rows, window):
        return run(model.model, window[prefix:], start=prefix, rows=rows)[0][:-1]

    expected = {arm: [] for arm in ARMS}
    for index, window in enumerate(windows):
        for arm, live in (("native", model), ("source", source)):
            expected[arm].append(tail_nll(live.model(input_ids=window[None]).logits[0, prefix:-1], window))
        expected["mapped"].append(tail_nll(on(mapped_rows(window), window), window))
        expected["wrong-document"].append(tail_nll(on(mapped_rows(windows[before[index]]), window), window))
        expected["empty"].append(tail_nll(on(None, window), window))
    for arm in ARMS:
        assert value(evidence, "nll", arm) == pytest.approx(
            float(torch.stack(expected[arm]).mean()), abs=1e-4
        )
        score = evidence.score("nll", arm)
        assert score.n == 4 * (tail - 1)
        assert score.low <= score.value <= score.high
    assert value(evidence, "ppl_ratio") == pytest.approx(math.exp(value(evidence, "excess_nll")))


def test_a_random_mapper_fails_the_gate(model, domains):
    source = tiny(7)
    many = {"one": sampled_windows(model, 50, 33, seed=1)}
    evidence = evaluate(RandomMapper(source, model), source, model, many, SETTINGS)
    failed = {check.name for check in evidence.verdict.checks if not check.passed}
    assert "positions" not in failed
    assert {"top1", "excess-nll"} <= failed
    assert value(evidence, "attention_cosine") < 0.5
    assert value(evidence, "r2_key") < 0


def test_gap_recovered_where_the_target_is_better(model, domains):
    # The text is the target's own, so another model is worse at it; all rows are exact but the last.
    source = tiny(7)
    settings = EvalSettings(tail=9, resamples=200, exact_prefix=23)
    evidence = evaluate(AffineMapper(source, model), source, model, domains, settings)
    assert evidence.score("gap_recovered").value > 0.8
    assert evidence.exact_prefix == 23
    assert "exact-prefix" in {c.name for c in evidence.verdict.checks if not c.passed}
    assert evidence.score("r2_key").n == 9  # one mapped row a window


def test_exact_prefix_comes_from_the_manifest(model, domains):
    source = tiny(7)
    evidence = evaluate(AffineMapper(source, model, exact_prefix=4), source, model, domains, SETTINGS)
    assert evidence.exact_prefix == 4
    assert evidence.score("r2_key").n == 9 * 20


def test_same_input_same_record(model, domains):
    source = tiny(7)
    one, two = (
        evaluate(AffineMapper(source, model), source, model, domains, SETTINGS).model_copy(
            update={"created": ""}
        )
        for _ in range(2)
    )
    assert one == two
    other = evaluate(
        AffineMapper(source, model), source, model, domains, EvalSettings(tail=9, resamples=200, seed=1)
    )
    assert other.score("nll").value == one.score("nll").value
    assert other.score("nll").low != one.score("nll").low
    assert one.text == other.text


def test_several_mappers_at_once_give_what_each_gives_alone(model, domains):
    source = tiny(7)
    mappers = [AffineMapper(source, model), RandomMapper(source, model, exact_prefix=3)]
    together = evaluate_all(mappers, source, model, domains, SETTINGS)
    for mapper, found in zip(mappers, together, strict=True):
        alone = evaluate(mapper, source, model, domains, SETTINGS)
        assert found.model_copy(update={"created": alone.created}) == alone
    assert together[0].scores != together[1].scores


def test_bfloat16_models_pass_the_injection_check(domains):
    half = tiny(1, dtype=torch.bfloat16)
    evidence = evaluate(AffineMapper(half, half), half, half, domains, SETTINGS)
    assert evidence.injection_max_logit_error < 0.5
    assert value(evidence, "kl") < 0.05


def test_nan_from_the_mapper_refuses(model, domains):
    with pytest.raises(Corrupt, match="mapped cache has a NaN or infinite row in layer 0"):
        evaluate(AffineMapper(model, model, float("nan")), model, model, domains, SETTINGS)


def test_a_live_model_other_than_the_fitted_one_refuses(model, domains):
    mapper = AffineMapper(model, model)
    with pytest.raises(
        Incompatible, match="target tiny-qwen3-9 is not the mapper's tiny-qwen3-1: its revision"
    ) as e:
        evaluate(mapper, model, tiny(9), domains, SETTINGS)
    assert e.value.code == "target-revision"
    with pytest.raises(Incompatible, match=r"the source .*: its dtype differs: bfloat16, fitted on float32"):
        evaluate(mapper, tiny(1, dtype=torch.bfloat16), model, domains, SETTINGS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: {}, "no text"),
        (lambda d: {"all": d["one"]}, "may not be called 'all'"),
        (lambda d: {"one": d["one"][:1]}, "1 held-out windows"),
        (lambda d: {"one": d["one"][:, :9]}, "no prefix"),
        (lambda d: {"one": d["one"], "two": d["two"][:, 1:]}, "one length"),
        (lambda d: {"one": torch.cat((d["one"], d["one"][:1]))}, "same prefix"),
        (lambda d: {"one": d["one"].repeat(1, 16)}, r"exceed the context of tiny-qwen3-1 \(512\)"),
    ],
)
def test_unusable_windows_refuse(model, domains, change, message):
    with pytest.raises(BadInput, match=message):
        evaluate(AffineMapper(model, model), model, model, change(domains), SETTINGS)
    with pytest.raises(BadInput, match="exact prefix of 24 leaves nothing"):
        evaluate(AffineMapper(model, model), model, model, domains, EvalSettings(tail=9, exact_prefix=24))


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 13, 18, 40])
def test_wrong_documents_are_a_derangement_far_apart(count):
    order = wrong_document_order(count)
    assert sorted(order) == list(range(count))
    if count >= 7:
        for at, index in enumerate(order):
            apart = abs(index - order[at - 1])
            assert min(apart, count - apart) >= count // 3


def test_a_model_that_misreads_an_injected_cache_is_refused(model, domains):
    off = tiny(1)
    forward = off.model.forward
    off.model.forward = lambda position_ids, past_key_values, **given: forward(
        position_ids=position_ids + (past_key_values.get_seq_length() > 0),  # one too far after any cache
        past_key_values=past_key_values,
        **given,
    )
    with pytest.raises(Incompatible, match="own cache, re-injected") as error:
        evaluate(AffineMapper(model, off), model, off, domains, SETTINGS)
    assert error.value.code == "injection"
