"""Every arm against transformers' own whole forward and its own greedy decoding."""

import pytest
import torch

from kvhub.errors import BadInput
from kvhub.evaluation.evidence import ARMS
from kvhub.tasks.caches import Caches
from kvhub.tasks.lm import MappedLM

CONTEXT = "The old bridge over the river was closed in spring, because the"
ANSWER = " water had risen"
OTHER = torch.tensor([40, 90, 17, 300, 22])


def whole(model, context, answer):
    """Log-likelihood of the answer in one forward of everything."""
    ids = torch.tensor([[*context, *answer]])
    with torch.inference_mode():
        logits = model.model(ids).logits[0, len(context) - 1 : -1].double()
    return float(torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None]).sum())


def score(caches, arm, context=CONTEXT, answer=ANSWER):
    lm = MappedLM(caches, arm)
    return lm._loglikelihood_tokens([(None, *lm._encode_pair(context, answer))])[0]


@pytest.mark.parametrize("arm", ["native", "mapped", "source"])
def test_with_an_identity_mapper_every_whole_cache_gives_the_models_own_likelihood(mapper_between, arm):
    caches = Caches(*mapper_between("small", "small"))
    lm = MappedLM(caches, arm)
    pair = lm._encode_pair(CONTEXT, ANSWER)
    assert score(caches, arm)[0] == pytest.approx(whole(caches.target, *pair), abs=1e-3)


def test_the_arms_differ_where_the_cache_does(mapper_between):
    caches = Caches(*mapper_between("small", "large"), other=OTHER)
    found = {arm: score(caches, arm)[0] for arm in ARMS}
    lm = MappedLM(caches, "native")
    pair = lm._encode_pair(CONTEXT, ANSWER)
    assert found["native"] == pytest.approx(whole(caches.target, *pair), abs=1e-3)
    assert found["source"] == pytest.approx(whole(caches.source, *pair), abs=1e-3)
    assert len({round(value, 3) for value in found.values()}) == len(ARMS)


def test_exact_rows_replace_mapped_ones(mapper_between):
    mapper, *pair = mapper_between("small", "large")
    noise = score(Caches(mapper, *pair, exact_prefix=0), "mapped")[0]
    exact = score(Caches(mapper, *pair, exact_prefix=1000), "mapped")[0]
    native = score(Caches(mapper, *pair), "native")[0]
    assert exact == pytest.approx(native, abs=1e-4)
    assert abs(noise - native) > 1e-2


def test_greedy_text_is_transformers_own(mapper_between):
    caches = Caches(*mapper_between("large", "large"))
    lm = MappedLM(caches, "mapped")
    context = lm.tok_encode(CONTEXT)
    with torch.inference_mode():
        own = caches.target.model.generate(torch.tensor([context]), max_new_tokens=12, do_sample=False)
    expected = lm.tokenizer.decode(own[0, len(context) :], skip_special_tokens=True)
    assert lm.decode(context, [], 12) == expected
    stop = expected[len(expected) // 2 :][:3]
    assert lm.decode(context, [stop], 12) == expected[: expected.find(stop)]


def test_answers_keep_their_order_and_greedy_is_told(mapper_between):
    caches = Caches(*mapper_between("small", "small"))
    lm = MappedLM(caches, "native")
    contexts = ["A", "The house on the hill", "The house"]
    requests = [(None, lm.tok_encode(c), lm.tok_encode(" is")) for c in contexts]
    together = lm._loglikelihood_tokens(requests)
    assert together == [lm._loglikelihood_tokens([request])[0] for request in requests]
    context = lm.tok_encode(CONTEXT)
    greedy = lm.tok_encode(lm.decode(context, [], 1))
    if len(greedy) == 1:
        assert lm._loglikelihood_tokens([(None, context, greedy)])[0][1]


def test_a_context_loses_its_beginning_where_positions_end(mapper_between):
    caches = Caches(*mapper_between("small", "small"))
    long = list(range(50, 60)) * (caches.context // 10 + 5)
    lm = MappedLM(caches, "empty")
    assert lm._fit(long, 10) == long[-(caches.context - 10) :]
    with pytest.raises(BadInput, match="does not fit"):
        lm._fit(long, caches.context)


def test_refusals(mapper_between):
    caches = Caches(*mapper_between("small", "small"))
    with pytest.raises(BadInput, match="no mapped prefix"):
        MappedLM(caches, "native").loglikelihood_rolling([])
    with pytest.raises(BadInput, match="needs other text"):
        caches.rows("wrong-document", [1, 2])
    with pytest.raises(BadInput, match="no arm"):
        caches.rows("exactly", [1, 2])
