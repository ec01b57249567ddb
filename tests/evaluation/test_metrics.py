import math

import numpy as np
import torch

from kvhub.evaluation.inject import KvRows
from kvhub.evaluation.metrics import attention_cosine, compare_logits, gap_recovered, row_moments
from kvhub.evaluation.summary import r2
from kvhub.model.identity import RopeSpec
from kvhub.model.rope import rotary_table
from kvhub_kernels.rotary import apply_rope

ROPE = RopeSpec(
    rope_type="default",
    rotary_dim=4,
    pairing="half",
    attention_factor=1.0,
    inverse_frequencies=[1.0, 0.1],
    parameters={"rope_theta": 100.0},
    max_position=64,
)


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_logit_sums_against_numpy():
    rng = np.random.default_rng(0)
    native, arm = (
        rng.normal(size=(70, 9)) * 2,
        rng.normal(size=(70, 11)) * 2,
    )  # padded differently; several chunks
    labels = rng.integers(9, size=70)
    p, q = _softmax(native), _softmax(arm[:, :9])
    sums = compare_logits(torch.tensor(native), torch.tensor(arm), torch.tensor(labels))
    assert math.isclose(sums.nll, -np.log(q[np.arange(70), labels]).sum(), rel_tol=1e-12)
    assert math.isclose(sums.kl, (p * np.log(p / q)).sum(), rel_tol=1e-12)
    assert sums.top1 == (p.argmax(-1) == q.argmax(-1)).sum()


def test_attention_cosine_against_numpy():
    rng = np.random.default_rng(1)
    q = rng.normal(size=(4, 3, 5)).astype(np.float32)
    native, mapped = (
        tuple(rng.normal(size=(7, 2, 5)).astype(np.float32) for _ in range(2)) for _ in range(2)
    )

    def output(k, v, head, query):
        weights = _softmax(k[:, head // 2] @ query * 0.3)
        return weights @ v[:, head // 2]

    expected = []
    for head in range(4):
        cosines = []
        for query in q[head]:
            a, b = output(*native, head, query), output(*mapped, head, query)
            cosines.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        expected.append(np.mean(cosines))
    found = attention_cosine(
        torch.tensor(q), 0.3, tuple(map(torch.tensor, native)), tuple(map(torch.tensor, mapped))
    )
    assert np.allclose(found, expected, atol=1e-6)


def test_gap_recovered():
    native, source = np.array([2.0, 2.0, 2.0, 2.5]), np.array([3.0, 3.0, 3.0, 2.0])
    mapped = np.array([2.0, 3.0, 2.25, 2.2])
    found = gap_recovered(native, source, mapped)
    assert found[:3].tolist() == [1.0, 0.0, 0.75]
    assert math.isnan(found[3])  # the source is better: no gap to recover


def test_r2_against_numpy_on_content_keys_and_pooled_windows():
    rng = np.random.default_rng(2)
    layers, skip = 3, 2
    content, guess, values, guessed, moments = [], [], [], [], []
    for length in (9, 12):
        table = rotary_table(ROPE, torch.arange(length))
        arrays = [[rng.normal(size=(length, 2, 4)) for _ in range(layers)] for _ in range(2)]
        arrays += [[a + 0.3 * rng.normal(size=a.shape) for a in side] for side in arrays]
        k, v, k_hat, v_hat = arrays
        content.append(k), values.append(v), guess.append(k_hat), guessed.append(v_hat)
        rotate = lambda side, t=table: tuple(apply_rope(torch.tensor(a), t) for a in side)  # noqa: E731
        plain = lambda side: tuple(map(torch.tensor, side))  # noqa: E731
        moments.append(
            row_moments(KvRows(rotate(k), plain(v)), KvRows(rotate(k_hat), plain(v_hat)), ROPE, skip)
        )

    def brute(truth, estimate, weights):
        found = []
        for layer in range(layers):
            heads = []
            for head in range(2):
                y = np.concatenate(
                    [np.tile(w[layer][skip:, head], (n, 1)) for w, n in zip(truth, weights, strict=True)]
                )
                e = np.concatenate(
                    [np.tile(w[layer][skip:, head], (n, 1)) for w, n in zip(estimate, weights, strict=True)]
                )
                heads.append(1 - ((y - e) ** 2).sum() / ((y - y.mean(0)) ** 2).sum())
            found.append(np.mean(heads))
        return found

    for weights in ([1, 1], [2, 0], [1, 3]):
        w = np.array([weights], dtype=np.float64)
        assert np.allclose(r2(w, [m[0] for m in moments])[0], brute(content, guess, weights), atol=1e-5)
        assert np.allclose(r2(w, [m[1] for m in moments])[0], brute(values, guessed, weights), atol=1e-12)
