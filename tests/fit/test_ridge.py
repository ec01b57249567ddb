from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.shapes import correlated, pair_moments, related, shape

from kvhub.errors import KvhubError
from kvhub.fit.ridge import PAPER, Regularization, solve_layer
from kvhub.fit.settings import FitSettings
from kvhub.fit.solve import stored
from kvhub.model.identity import Geometry

UNEQUAL = (shape(5, 2, 6), shape(3, 4, 8))
EQUAL = (shape(5, 3, 6), shape(3, 3, 8))
REGULARIZATIONS = [Regularization(1e-3), Regularization(1e-8), Regularization(0.0), PAPER]


def reference(x: np.ndarray, y: np.ndarray, regularization: Regularization) -> tuple[np.ndarray, np.ndarray]:
    """Centre the rows themselves, then one numpy solve: no moments involved."""
    centred = x - x.mean(0)
    gram = centred.T @ centred
    if regularization.convention == "absolute-mean":
        gram = gram / len(x) + regularization.value * np.eye(len(gram))
        weight = np.linalg.solve(gram, centred.T @ (y - y.mean(0)) / len(x))
    else:
        gram += regularization.value * np.trace(gram) / len(gram) * np.eye(len(gram))
        weight = np.linalg.solve(gram, centred.T @ (y - y.mean(0)))
    return weight, y.mean(0) - x.mean(0) @ weight


def relative(found: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found.numpy() - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("regularization", REGULARIZATIONS)
@pytest.mark.parametrize(("source", "target"), [EQUAL, UNEQUAL])
def test_full_equals_a_numpy_solve_on_the_same_rows(
    source: Geometry, target: Geometry, regularization: Regularization
) -> None:
    x, y = related(400, source, target, 0)
    moments = pair_moments((x, y), (x, y), source, target).key
    chosen, layer = [0, 2, 3], 1
    affine = solve_layer(moments, source, target, layer, chosen, regularization)
    inputs = x.reshape(400, source.num_layers, -1)[:, chosen].flatten(1).numpy()
    outputs = y.reshape(400, target.num_layers, -1)[:, layer].numpy()
    weight, bias = reference(inputs, outputs, regularization)
    assert affine.weight.shape == (3 * source.features, target.features)
    assert relative(affine.weight, weight) < 1e-6
    assert relative(affine.bias(), bias) < 1e-6


@pytest.mark.parametrize("regularization", REGULARIZATIONS)
def test_head_local_is_one_small_solve_for_each_head(regularization: Regularization) -> None:
    source, target = EQUAL
    x, y = related(400, source, target, 3)
    moments = pair_moments((x, y), (x, y), source, target).key
    chosen, layer = [1, 4], 2
    affine = solve_layer(moments, source, target, layer, chosen, regularization, support="head-local")
    heads = x.reshape(400, source.num_layers, source.num_kv_heads, -1)
    outputs = y.reshape(400, target.num_layers, target.num_kv_heads, -1)
    assert affine.weight.shape == (3, 2 * source.head_dim, target.head_dim)
    for head in range(3):
        inputs = heads[:, chosen, head].flatten(1).numpy()
        weight, bias = reference(inputs, outputs[:, layer, head].numpy(), regularization)
        assert relative(affine.weight[head], weight) < 1e-6
        assert relative(affine.bias()[head], bias) < 1e-6


def test_a_known_linear_relation_is_recovered() -> None:
    source, target = UNEQUAL
    x = correlated(500, source.num_layers * source.features, 0)
    chosen = [1, 3]
    inputs = x.reshape(500, source.num_layers, -1)[:, chosen].flatten(1)
    truth = correlated(inputs.shape[1], target.num_layers * target.features, 9) / 10
    offset = torch.linspace(-100, 100, truth.shape[1], dtype=torch.float64)
    y = inputs @ truth + offset
    moments = pair_moments((x, y), (x, y), source, target).key
    for layer in range(target.num_layers):
        here = slice(layer * target.features, (layer + 1) * target.features)
        affine = solve_layer(moments, source, target, layer, chosen, Regularization(1e-12))
        torch.testing.assert_close(affine.weight, truth[:, here], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(affine.bias(), offset[here], rtol=1e-6, atol=1e-5)


def test_the_bias_makes_up_for_rounded_weights() -> None:
    source, target = shape(2, 1, 6), shape(1, 1, 4)
    x, y = related(400, source, target, 0)
    x = x + 500  # keys of models with large key biases
    moments = pair_moments((x, y), (x, y), source, target).key
    affine = solve_layer(moments, source, target, 0, [0, 1], Regularization(1e-3))
    rounded = affine.weight.to(torch.bfloat16)
    mean = x.mean(0) @ rounded.double()
    torch.testing.assert_close(mean + affine.bias(rounded), y.mean(0), rtol=1e-9, atol=1e-9)
    assert (mean + affine.bias() - y.mean(0)).abs().max() > 0.1  # what it would be otherwise
    written = stored(affine, 0, "k", target, FitSettings(k=2, store_dtype="bfloat16"))
    assert torch.equal(written["layers.0.k.weight"], rounded)
    mapped = mean + written["layers.0.k.bias"].flatten().double()
    torch.testing.assert_close(mapped, y.mean(0), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("support", ["full", "head-local"])
def test_a_singular_gram_without_ridge_is_refused_naming_the_layer(support: Any) -> None:
    source = target = shape(2, 1, 4)
    x = correlated(300, 8, 0)
    x[:, 3] = 2.5  # never varies: a zero on the diagonal of the centred Gram
    moments = pair_moments((x, x), (x, x), source, target).key
    with pytest.raises(KvhubError, match="target layer 1 are not positive definite"):
        solve_layer(moments, source, target, 1, [0, 1], Regularization(0.0), support=support)
    solve_layer(moments, source, target, 1, [0, 1], Regularization(1e-6), support=support)
