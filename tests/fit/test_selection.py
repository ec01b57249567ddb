from __future__ import annotations

import numpy as np
import pytest
import torch
from support.shapes import correlated, pair_moments, related, shape
from torch import Tensor

from kvhub.errors import BadInput
from kvhub.fit.selection import layer_scores, matched_heads, select_layers, single_source_r2
from kvhub.model.identity import Geometry


def brute_force_r2(x: Tensor, y: Tensor, source: Geometry, target: Geometry) -> np.ndarray:
    """R2 of an lstsq with an intercept column for every (target layer, source layer), mean over heads."""
    xs = x.numpy().reshape(len(x), source.num_layers, source.num_kv_heads, source.head_dim)
    ys = y.numpy().reshape(len(y), target.num_layers, target.num_kv_heads, target.head_dim)
    scores = np.zeros((target.num_layers, source.num_layers))
    for t in range(target.num_layers):
        for s in range(source.num_layers):
            found = []
            for h in range(target.num_kv_heads):
                design = xs[:, s, h * source.num_kv_heads // target.num_kv_heads]
                design = np.concatenate((design, np.ones((len(x), 1))), axis=1)
                rest = ys[:, t, h] - design @ np.linalg.lstsq(design, ys[:, t, h], rcond=None)[0]
                spread = ys[:, t, h] - ys[:, t, h].mean(0)
                found.append(1 - (rest**2).sum() / (spread**2).sum())
            scores[t, s] = np.mean(found)
    return scores


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (shape(5, 2, 6), shape(7, 2, 6)),
        (shape(6, 2, 4), shape(4, 4, 8)),  # fewer source heads: neighbours share one
        (shape(4, 4, 8), shape(3, 2, 4)),  # more source heads: every second is read
        (shape(3, 3, 5), shape(4, 2, 6)),
    ],
)
def test_scores_and_lists_equal_brute_force(source: Geometry, target: Geometry) -> None:
    key, value = related(300, source, target, 0), related(300, source, target, 10)
    moments = pair_moments(key, value, source, target)
    expected = (brute_force_r2(*key, source, target) + brute_force_r2(*value, source, target)) / 2
    np.testing.assert_allclose(layer_scores(moments, source, target).numpy(), expected, atol=1e-9)
    for k in (1, 2, source.num_layers):
        lists = [sorted(np.argsort(-row, kind="stable")[:k].tolist()) for row in expected]
        assert select_layers(moments, source, target, k) == lists


def test_matched_heads() -> None:
    assert matched_heads(shape(1, 8, 4), shape(1, 8, 4)) == list(range(8))
    assert matched_heads(shape(1, 2, 4), shape(1, 8, 4)) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert matched_heads(shape(1, 8, 4), shape(1, 2, 4)) == [0, 4]
    assert matched_heads(shape(1, 3, 4), shape(1, 2, 4)) == [0, 1]


def test_ties_go_to_the_lower_layer() -> None:
    source, target = shape(4, 1, 3), shape(1, 1, 3)
    x = correlated(100, 3, 0)
    # Layers 1 and 3 hold the same numbers, in another scale: their R2 differ in the last bits at most.
    noise = correlated(100, 6, 5)
    stacked = torch.cat((noise[:, :3], x, noise[:, 3:], x * 3.7), dim=1)
    y = x @ correlated(3, 3, 6)
    moments = pair_moments((stacked, y), (stacked, y), source, target)
    assert select_layers(moments, source, target, 1) == [[1]]
    assert select_layers(moments, source, target, 2) == [[1, 3]]


def test_singular_and_constant_heads_get_finite_scores() -> None:
    source, target = shape(3, 1, 4), shape(2, 1, 4)
    x = correlated(200, 12, 0)
    x[:, 1] = x[:, 0]  # layer 0: singular
    x[:, 4:8] = 7.25  # layer 1: constant
    y = torch.cat((x[:, :4] * 2 + 1, torch.full((200, 4), -3.125, dtype=torch.float64)), dim=1)
    moments = pair_moments((x, y), (x, y), source, target)
    scores = single_source_r2(moments.key, source, target)
    assert scores[0, 0] == pytest.approx(1, abs=1e-9)
    assert scores[0, 1] == 0 and torch.all(scores[1] == 0)
    assert bool(torch.isfinite(scores).all())


@pytest.mark.parametrize("k", [0, -1, 4])
def test_k_beyond_the_source_is_refused_naming_the_largest(k: int) -> None:
    source = shape(3, 1, 2)
    rows = correlated(20, 6, 0)
    moments = pair_moments((rows, rows), (rows, rows), source, source)
    with pytest.raises(BadInput, match=r"1\.\.3"):
        select_layers(moments, source, source, k)
