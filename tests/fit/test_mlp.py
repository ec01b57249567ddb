"""Networks instead of matrices: what they can and a matrix cannot, and the same ones twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvhub.errors import BadInput
from kvhub.fit.mlp import MlpSettings, train_networks
from kvhub_kernels.mlp import apply_perceptron


def bent(groups: int = 2, rows: int = 600) -> tuple[Tensor, Tensor]:
    """Rows that no affine map explains: |x| with an offset of a hundred spreads."""
    x = torch.randn(groups, rows, 3, generator=torch.Generator().manual_seed(0))
    return 5 * x + 500, 0.01 * x.abs()[..., :2] - 1


def test_what_is_bent_is_learned_where_a_matrix_explains_nothing() -> None:
    x, y = bent()
    layers, curve = train_networks(
        x[:, :500], y[:, :500], MlpSettings((24, 24), epochs=60, batch=50, rate=5e-3), 0
    )
    found = apply_perceptron(x[:, 500:], layers)
    truth = y[:, 500:]
    errors = (found - truth).square().sum() / (truth - truth.mean(1, keepdim=True)).square().sum()
    assert errors < 0.1 and curve[-1] < 0.1 < 0.8 < curve[0]
    flat = torch.cat((x[0, :500], torch.ones(500, 1)), 1)
    linear = torch.linalg.lstsq(flat, y[0, :500]).solution
    left = (torch.cat((x[0, 500:], torch.ones(100, 1)), 1) @ linear - truth[0]).square().sum()
    assert left > 0.8 * (truth[0] - truth[0].mean(0)).square().sum()


def test_the_same_seed_gives_the_same_networks() -> None:
    x, y = bent(rows=64)
    settings = MlpSettings((4, 4), epochs=2, batch=16)
    one, two, other = (train_networks(x[:1], y, settings, seed) for seed in (1, 1, 2))
    assert one[1] == two[1] != other[1]
    assert all(
        torch.equal(a, b) for p, q in zip(one[0], two[0], strict=True) for a, b in zip(p, q, strict=True)
    )
    assert one[0][0].weight.shape == (2, 3, 4)  # one input, two networks


def test_a_column_that_never_varies_is_no_division_by_zero() -> None:
    x, y = bent(1, 32)
    x[..., 1], y[..., 0] = 7, 3
    layers, _ = train_networks(x, y, MlpSettings((4, 4), epochs=1), 0)
    assert all(bool(torch.isfinite(tensor).all()) for layer in layers for tensor in layer)


@pytest.mark.parametrize(
    "wrong", [{"hidden": (0, 4)}, {"hidden": (4, 1 << 20)}, {"epochs": 0}, {"rate": 0.0}]
)
def test_settings_that_make_no_network_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        MlpSettings(**wrong)  # type: ignore[arg-type]
