"""Every diagnostic against loops over tokens, heads and queries."""

import numpy as np
import pytest
import torch

from kvhub.diagnostics.attention import attention_weights, causal_weights
from kvhub.diagnostics.buckets import by_bucket
from kvhub.diagnostics.key_concentration import key_error_concentration
from kvhub.diagnostics.output_error import output_error
from kvhub.diagnostics.positions import position_errors
from kvhub.diagnostics.value_concentration import value_error_concentration

HEADS, KV, D, TOKENS, N = 4, 2, 6, 9, 5


def rows(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def setting():
    queries, scaling = rows(0, HEADS, N, D), 0.4
    native = rows(1, TOKENS, KV, D), rows(2, TOKENS, KV, D)
    mapped = tuple(side + 0.3 * rows(3 + i, TOKENS, KV, D) for i, side in enumerate(native))
    return queries, scaling, native, mapped


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def weights_of(queries, keys, scaling, head, query, seen):
    q, k = queries[head, query].double().numpy(), keys[:seen, head // 2].double().numpy()
    return softmax(np.array([q @ row for row in k]) * scaling)


def test_attention_weights(setting):
    queries, scaling, native, _ = setting
    found = attention_weights(queries, native[0], scaling)
    causal = causal_weights(queries, native[0], scaling)
    for head in range(HEADS):
        for query in range(N):
            expected = weights_of(queries, native[0], scaling, head, query, TOKENS)
            assert found[head, query].numpy() == pytest.approx(expected, abs=1e-6)
            seen = TOKENS - N + query + 1
            expected = weights_of(queries, native[0], scaling, head, query, seen)
            assert causal[head, query, :seen].numpy() == pytest.approx(expected, abs=1e-6)
            assert float(causal[head, query, seen:].sum()) == 0


@pytest.mark.parametrize("count", [N, 3 * D])  # fewer queries than dimensions, and more
def test_key_error_concentration(setting, count):
    _, _, native, mapped = setting
    queries = rows(9, HEADS, count, D)
    found = key_error_concentration(queries, native[0], mapped[0])
    for head in range(HEADS):
        q = queries[head].double().numpy()
        error = (mapped[0] - native[0])[:, head // 2].double().numpy()
        _, singular, right = np.linalg.svd(q, full_matrices=False)  # as published; the code needs none
        along = np.array([np.mean([(e @ v) ** 2 for e in error]) for v in right])
        seen = np.sum(singular**2 * along) / np.sum(singular**2)
        assert float(found[head]) == pytest.approx(seen / (np.mean(np.sum(error**2, 1)) / D))


def test_key_error_where_queries_look_and_where_they_do_not():
    queries = torch.zeros(1, 7, D)
    queries[0, :, 0] = rows(0, 7)  # every query lies along the first dimension
    native = torch.zeros(TOKENS, 1, D)
    along, across = native.clone(), native.clone()
    along[:, 0, 0], across[:, 0, 1] = 1.0, 1.0
    assert float(key_error_concentration(queries, native, along)[0]) == pytest.approx(D)
    assert float(key_error_concentration(queries, native, across)[0]) == pytest.approx(0, abs=1e-9)
    assert float(key_error_concentration(queries, native, native)[0]) == 1


def test_value_error_concentration(setting):
    queries, scaling, native, mapped = setting
    found = value_error_concentration(attention_weights(queries, native[0], scaling), native[1], mapped[1])
    for head in range(HEADS):
        error = ((mapped[1] - native[1])[:, head // 2].double().numpy() ** 2).sum(1)
        weight = sum(weights_of(queries, native[0], scaling, head, query, TOKENS) ** 2 for query in range(N))
        expected = (weight * error).sum() / weight.sum() / error.mean()
        assert float(found[head]) == pytest.approx(expected, rel=1e-5)


def test_value_error_on_the_one_token_that_is_read():
    weights = torch.zeros(1, 1, TOKENS)
    weights[..., 2] = 1
    native = torch.zeros(TOKENS, 1, D)
    read, other = native.clone(), native.clone()
    read[2], other[3] = 1.0, 1.0
    assert float(value_error_concentration(weights, native, read)[0]) == pytest.approx(TOKENS)
    assert float(value_error_concentration(weights, native, other)[0]) == 0
    assert float(value_error_concentration(weights, native, native)[0]) == 1


def test_output_error(setting):
    queries, scaling, native, mapped = setting
    split, hidden = TOKENS - N, 7
    projection, residual = rows(11, hidden, HEADS * D), rows(12, N, hidden)
    prefix = tuple(side[:split] for side in mapped)
    found = output_error(queries, scaling, native, prefix, projection, residual)
    keys, values = (torch.cat((m, n[split:])) for m, n in zip(prefix, native, strict=True))
    moved, length, kl = np.zeros((N, HEADS, D)), np.zeros((N, HEADS, D)), np.zeros((N, HEADS))
    for head in range(HEADS):
        for query in range(N):
            seen = split + query + 1
            before = weights_of(queries, native[0], scaling, head, query, seen)
            after = weights_of(queries, keys, scaling, head, query, seen)
            right = before @ native[1][:seen, head // 2].double().numpy()
            moved[query, head] = after @ values[:seen, head // 2].double().numpy() - right
            length[query, head] = right
            kl[query, head] = np.sum(before * np.log(before / after))
    expected = (moved**2).sum((0, 2)) / (length**2).sum((0, 2))
    assert found.output.numpy() == pytest.approx(expected, rel=1e-4)
    assert found.attention_kl.numpy() == pytest.approx(kl.mean(0), rel=1e-3)
    pushed = np.stack([projection.double().numpy() @ moved[query].reshape(-1) for query in range(N)])
    writes = np.stack([projection.double().numpy() @ length[query].reshape(-1) for query in range(N)])
    expected = (pushed**2).sum() / ((residual.double().numpy() + writes) ** 2).sum()
    assert float(found.residual) == pytest.approx(expected, rel=1e-4)


def test_output_error_of_an_exact_prefix_is_nothing(setting):
    queries, scaling, native, _ = setting
    prefix = tuple(side[: TOKENS - N] for side in native)
    found = output_error(queries, scaling, native, prefix, rows(1, 3, HEADS * D), rows(2, N, 3))
    assert float(found.output.max()) == float(found.attention_kl.max()) == float(found.residual) == 0


def test_position_errors_average_to_one_minus_r2(setting):
    _, _, native, mapped = setting
    found = position_errors(native[1], mapped[1])
    y, y_hat = native[1].double().flatten(1).numpy(), mapped[1].double().flatten(1).numpy()
    r2 = 1 - ((y - y_hat) ** 2).sum() / ((y - y.mean(0)) ** 2).sum()
    assert float((found.errors / found.spread).mean()) == pytest.approx(1 - r2)
    assert found.errors[3].item() == pytest.approx(((y - y_hat)[3] ** 2).sum())


def test_buckets_cover_every_position_once():
    names = by_bucket([float(position) for position in range(20)])
    assert [name for name, _ in names] == ["0", "1-3", "4-15", "16-19"]
    assert [value for _, value in names] == [0, 2, 9.5, 17.5]
    assert by_bucket([1.0]) == [("0", 1.0)]
