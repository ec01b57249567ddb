from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvhub.fit.moments import Moments, PairMoments
from kvhub.model.identity import Geometry


def shape(layers: int, heads: int, dim: int) -> Geometry:
    return Geometry(
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        hidden_size=8,
        k_norm=False,
    )


def rows(count: int, features: int, seed: int, mean: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, features, generator=generator, dtype=torch.float64) + mean


def accumulated(x: Tensor, y: Tensor, *, both: bool, block: int = 97) -> Moments:
    moments = Moments.zeros(x.shape[1], y.shape[1], both=both)
    for start in range(0, len(x), block):
        moments.add(x[start : start + block], y[start : start + block])
    moments.symmetrize()
    return moments


def test_streamed_moments_equal_the_direct_products() -> None:
    x, y = rows(500, 600, 0), rows(500, 700, 1)  # wide enough for several bands
    moments = accumulated(x, y, both=True)
    for found, expected in (
        (moments.x, x.sum(0)),
        (moments.y, y.sum(0)),
        (moments.xx, x.T @ x),
        (moments.xy, x.T @ y),
        (moments.yy, y.T @ y),
        (moments.centred_yy(), (y - y.mean(0)).square().sum(0)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-9)
    assert moments.n == 500
    single = accumulated(x, y, both=False)
    torch.testing.assert_close(single.yy, moments.yy.diagonal(), rtol=1e-12, atol=0)


def test_centring_survives_means_a_thousand_times_the_spread() -> None:
    """The case that plain float32 sums lose: the products of the means cancel."""
    x, y = rows(4000, 24, 2, mean=1000.0), rows(4000, 8, 3, mean=-1000.0)
    moments = accumulated(x, y, both=False)
    every, out = torch.arange(24), torch.arange(8)
    centred = x - x.mean(0)
    found = moments.centred_xx(every[:, None], every[None, :])
    torch.testing.assert_close(found, centred.T @ centred, rtol=1e-7, atol=1e-4)
    assert torch.linalg.eigvalsh(found)[0] > 3000
    naive = x.float().T @ x.float() - x.float().sum(0)[:, None] * x.float().sum(0) / len(x)
    assert (naive.double() - centred.T @ centred).abs().max() > 10  # what is avoided
    cross = moments.centred_xy(every[:, None], out[None, :])
    torch.testing.assert_close(cross, centred.T @ (y - y.mean(0)), rtol=1e-7, atol=1e-4)


def test_merge_of_two_halves_is_one_pass() -> None:
    source, target = shape(2, 2, 4), shape(3, 1, 8)
    sides = [
        [rows(60, 16, s), rows(60, 16, s + 1), rows(60, 24, s + 2), rows(60, 24, s + 3)] for s in (0, 10)
    ]
    one = PairMoments.zeros(source, target, both=True)
    halves = [PairMoments.zeros(source, target, both=True) for _ in sides]
    for half, (xk, xv, yk, yv) in zip(halves, sides, strict=True):
        half.add((xk, xv), (yk, yv))
        one.add((xk, xv), (yk, yv))
    one.flush()
    halves[0].merge(halves[1])
    for side in ("key", "value"):
        for field in ("n", "x", "y", "xx", "xy", "yy"):
            merged, direct = (getattr(getattr(m, side), field) for m in (halves[0], one))
            torch.testing.assert_close(merged, direct, rtol=1e-12, atol=1e-12)


def test_reversed_shares_memory_and_needs_both() -> None:
    x, y = rows(50, 6, 0), rows(50, 9, 1)
    backward = accumulated(x, y, both=True).reversed()
    direct = accumulated(y, x, both=True)
    for field in ("x", "y", "xx", "xy", "yy"):
        torch.testing.assert_close(getattr(backward, field), getattr(direct, field))
    forward = accumulated(x, y, both=True)
    assert forward.reversed().xy.data_ptr() == forward.xy.data_ptr()
    with pytest.raises(ValueError):
        accumulated(x, y, both=False).reversed()


def test_rows_wait_for_a_full_block_and_none_is_lost() -> None:
    geometry = shape(1, 1, 4)
    moments = PairMoments.zeros(geometry, geometry)
    parts = [rows(300, 4, seed) for seed in range(5)]
    for part in parts:
        moments.add((part, part * 2), (part, part))
    moments.flush()
    moments.flush()
    everything = torch.cat(parts)
    assert moments.key.n == moments.value.n == 1500
    torch.testing.assert_close(moments.key.xx, everything.T @ everything, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(moments.value.xy, 2 * everything.T @ everything, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("both", [False, True])
def test_shared_work_gives_the_same_bits(workers: int, both: bool) -> None:
    """Each process adds to its own bands only, so there is no other order of rounding."""
    source, target = shape(3, 2, 100), shape(4, 1, 150)
    parts = [
        tuple((rows(700, f, seed), rows(700, f, seed + 50)) for f, seed in ((600, s), (600, s + 9)))
        for s in range(3)
    ]

    def run(rank: int, size: int) -> PairMoments:
        moments = PairMoments.zeros(source, target, both=both)
        moments.share(rank, size)
        for one, other in parts:
            moments.add(one, other)
        moments.fold()
        return moments

    alone, team = run(0, 1), [run(rank, workers) for rank in range(workers)]
    load = [0] * workers
    for (kind, band), owner in alone.owners(workers).items():
        assert torch.equal(band.of(getattr(team[owner], kind)), band.of(getattr(alone, kind)))
        load[owner] += band.cost
        others = [band.of(getattr(one, kind)) for rank, one in enumerate(team) if rank != owner]
        assert not any(other.any() for other in others)
    assert max(load) < 1.5 * sum(load) / workers
    assert all(torch.equal(one.key.x, alone.key.x) and one.value.n == 2100 for one in team)
