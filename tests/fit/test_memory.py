from __future__ import annotations

import pytest

from kvhub.errors import BadInput
from kvhub.fit.memory import budget, demand_memory, free_memory, memory_needed, moment_bytes
from kvhub.fit.moments import PairMoments
from kvhub.fit.settings import FitSettings
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


@pytest.mark.parametrize("both", [False, True])
def test_moment_bytes_are_those_of_the_tensors(both: bool) -> None:
    source, target = shape(3, 2, 8), shape(5, 1, 16)
    moments = PairMoments.zeros(source, target, both=both)
    held = sum(
        getattr(side, name).nbytes
        for side in (moments.key, moments.value)
        for name in ("x", "y", "xx", "xy", "yy")
    )
    assert held == moment_bytes(source, target, both=both)


def test_the_paper_s_largest_pair_and_what_low_memory_saves() -> None:
    source, target = shape(40, 8, 128), shape(64, 8, 128)
    needed = memory_needed(source, target, k=8, both=False)
    assert 68e9 < 16 * 40960 * (40960 + 65536) <= needed < 80e9
    settings = FitSettings()
    weights = 28_000_000_000, 64_000_000_000
    plain = budget(source, target, settings, both=False, weights=weights)
    low = budget(source, target, settings, both=False, weights=weights, low_memory=True)
    assert plain.total - low.total == pytest.approx(1.02 * 92e9, rel=0.01)  # its moments outweigh one model
    assert f"{plain.total / 1e9:.1f} GB at the peak (models 92.0" in str(plain)


def test_too_little_memory_is_refused() -> None:
    demand_memory(1000, hint="", available=1000)
    with pytest.raises(BadInput) as caught:
        demand_memory(2_000_000_000, hint="one direction at a time", available=1_000_000_000)
    assert "needs 2.0 GB and 1.0 GB are free" in caught.value.message
    assert caught.value.hint == "one direction at a time"
    free = free_memory()
    assert free is None or free > 10_000_000
