"""Each recipe against what it should be at its ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvhub.fit.capture import Capture
from kvhub.fit.moments import PairMoments
from kvhub.fit.recipes.first import LOOK, WEIGHT, extra, has_sink, repeated, settled
from kvhub.fit.recipes.groupwise import solve_groupwise
from kvhub.fit.ridge import Regularization
from kvhub.fit.settings import FitSettings
from kvhub.fit.solve import Solved, solve_pair
from kvhub.model.identity import Geometry

SOURCE = Geometry(
    num_layers=3, num_attention_heads=4, num_kv_heads=2, head_dim=4, hidden_size=16, k_norm=False
)
TARGET = Geometry(
    num_layers=2, num_attention_heads=4, num_kv_heads=2, head_dim=6, hidden_size=16, k_norm=False
)
LAYERS = [[0, 1], [1, 2]]
R = Regularization(1e-2)
Rows = tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    generator = torch.Generator().manual_seed(0)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(400, width, generator=generator, dtype=torch.float64)

    sides = []
    for _ in range(2):
        x = draw(24) + 0.5
        sides.append((x, 0.3 * x @ draw(24)[:24, :] @ draw(24)[:24] @ draw(24)[:24, :24] + draw(24) + 2))
    return (sides[0][0], sides[1][0]), (sides[0][1], sides[1][1])


@pytest.fixture(scope="module")
def moments(rows: Rows) -> PairMoments:
    made = PairMoments.zeros(SOURCE, TARGET)
    made.add(*rows)
    made.flush()
    return made


def settings(**changes: object) -> FitSettings:
    return FitSettings(k=2, store_dtype="float32", **changes)  # type: ignore[arg-type]


def solved(moments: PairMoments, **changes: object) -> Solved:
    return solve_pair(moments, SOURCE, TARGET, LAYERS, R, settings(**changes))


def test_equal_penalties_are_ridge(moments: PairMoments) -> None:
    found = solve_groupwise(moments, SOURCE, TARGET, LAYERS, R, settings(), factor=1.0)
    for name, tensor in solved(moments).tensors.items():
        torch.testing.assert_close(found.tensors[name], tensor)


def test_an_infinite_penalty_is_head_local(moments: PairMoments) -> None:
    found = solve_groupwise(moments, SOURCE, TARGET, LAYERS, Regularization(1e-9), settings(), factor=1e16)
    local = solve_pair(
        moments, SOURCE, TARGET, LAYERS, Regularization(1e-9), settings(support="head-local")
    ).tensors
    for name in ("layers.0.k", "layers.1.v"):
        # rows: layer, head, dimension; columns: head, dimension
        full = found.tensors[f"{name}.weight"].view(2, 2, 4, 2, 6)
        for head in (0, 1):
            own = full[:, head, :, head].reshape(8, 6)
            torch.testing.assert_close(own, local[f"{name}.weight"][head], rtol=1e-3, atol=1e-4)
            assert full[:, 1 - head, :, head].abs().max() < 1e-4 * own.abs().max()
        torch.testing.assert_close(found.tensors[f"{name}.bias"], local[f"{name}.bias"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_stretched_rows_keep_mean_and_spread(rows: Rows, moments: PairMoments, share: float) -> None:
    plain = solved(moments)
    found = solved(moments, stretch=share).tensors
    x, y = rows[0][0].float(), rows[1][0].float()
    for number, chosen in enumerate(LAYERS):
        inputs = torch.cat([x[:, 8 * layer : 8 * layer + 8] for layer in chosen], dim=1)
        prefix = f"layers.{number}.k"
        mapped = inputs @ found[f"{prefix}.weight"] + found[f"{prefix}.bias"].flatten()
        wanted = y[:, 12 * number : 12 * number + 12]
        torch.testing.assert_close(mapped.mean(0), wanted.mean(0), rtol=1e-3, atol=1e-3)
        spreads = [t.view(400, 2, 6).var(0).sum(1) for t in (mapped, wanted)]
        if share:
            torch.testing.assert_close(*spreads, rtol=1e-3, atol=1e-3)
        else:
            assert (spreads[0] < spreads[1]).all()
            torch.testing.assert_close(found[f"{prefix}.weight"], plain.tensors[f"{prefix}.weight"])
        assert torch.equal(found[f"layers.{number}.v.weight"], plain.tensors[f"layers.{number}.v.weight"])


def test_first_rows_count_several_times(rows: Rows) -> None:
    positions = range(0, 800, 2)
    keys, values = repeated(rows[0], positions, 3)
    assert len(keys) == len(values) == 400 + extra(positions, 3) == 402
    assert torch.equal(keys[400:], rows[0][0][:1].repeat(2, 1))
    assert repeated(rows[0], positions, 1) is rows[0]
    assert repeated(rows[0], range(4, 804, 2), 3) is rows[0]


@pytest.mark.parametrize("apart", [0.0, 2.0])
def test_a_sink_is_told_from_chance(apart: float) -> None:
    side = Looked(apart)
    assert has_sink(side.capture(number) for number in range(8)) == (apart > 0)


class Looked:
    """A side whose first rows are `apart`, and what was asked of it."""

    def __init__(self, apart: float) -> None:
        self.apart, self.windows = apart, list[Any]()

    def capture(self, window: Any) -> Capture:
        self.windows.append(window)
        generator = torch.Generator().manual_seed(len(self.windows))
        keys = [torch.randn(64, 2, 8, generator=generator) for _ in range(3)]
        for key in keys:
            key[0] += self.apart
        return Capture(keys, keys, keys)


@pytest.mark.parametrize(
    ("source", "target", "weight"),
    [(0.0, 0.0, 1), (2.0, 0.0, WEIGHT), (0.0, 2.0, WEIGHT), (2.0, 2.0, WEIGHT)],
)
def test_the_first_row_counts_more_where_a_model_of_the_pair_has_a_sink(
    source: float, target: float, weight: int
) -> None:
    sides: list[Any] = [Looked(source), Looked(target)]
    windows: list[Any] = list(range(LOOK + 3))
    asked = settings(first_weight=0, stretch=0.5)
    assert settled(asked, sides, windows) == settings(first_weight=weight, stretch=0.5)
    assert all(side.windows in ([], windows[:LOOK]) for side in sides)


def test_a_weight_that_was_given_is_kept_without_a_look() -> None:
    sides: list[Any] = [Looked(2.0), Looked(2.0)]
    assert settled(settings(first_weight=3), sides, [torch.zeros(4)]) == settings(first_weight=3)
    assert not sides[0].windows and not sides[1].windows
