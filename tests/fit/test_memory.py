from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.peak import peak_of_fit, peak_of_resumed

from kvhub.errors import BadInput
from kvhub.fit.budget import budget, memory_needed, moment_bytes
from kvhub.fit.distill.schedule import Distill
from kvhub.fit.footprint import Footprint
from kvhub.fit.memory import demand_memory, free_memory, held
from kvhub.fit.moments import PairMoments
from kvhub.fit.settings import FitSettings
from kvhub.model.identity import Geometry

ROOT = Path(__file__).parents[2]


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
    models = Footprint(28_000_000_000, 0, 0), Footprint(64_000_000_000, 0, 0)
    plain = budget(source, target, settings, both=False, models=models)
    low = budget(source, target, settings, both=False, models=models, low_memory=True)
    assert plain.total - low.total == pytest.approx(1.03 * 92e9, rel=0.01)  # its moments outweigh one model
    assert f"{plain.total / 1e9:.2f} GB at the peak, while it" in str(plain)
    assert "(models 92.00, moments" in str(plain)


def test_a_model_whose_captures_are_all_there_takes_nothing() -> None:
    source, target = shape(4, 2, 16), shape(6, 2, 16)
    models = Footprint(5_000_000_000, 0, 0, 1_000_000_000), Footprint(9_000_000_000, 0, 100, 2_000_000_000)

    def needed(settings: FitSettings, *captured: bool, low: bool = False) -> float:
        return budget(
            source,
            target,
            settings,
            both=False,
            models=models,
            captured=(captured[0], captured[1]),
            low_memory=low,
        ).models

    plain, steps = FitSettings(k=2), FitSettings(k=2, train=Distill())
    assert needed(plain, False, False) == 11_000_000_000  # no logits: the embeddings stay in the file
    assert needed(plain, True, False) == 7_000_000_000
    assert needed(plain, True, True) == needed(plain, True, True, low=True) == 0
    assert needed(plain, False, False, low=True) == 7_000_000_000
    assert needed(steps, False, False) == 13_000_000_000  # the target computes logits
    assert needed(steps, True, True) == needed(steps, True, True, low=True) == 9_000_000_000


def test_too_little_memory_is_refused() -> None:
    demand_memory(1000, hint="", available=1000)
    with pytest.raises(BadInput) as caught:
        demand_memory(2_000_000_000, hint="one direction at a time", available=1_000_000_000)
    assert "needs 2.0 GB and 1.0 GB may be used" in caught.value.message
    assert caught.value.hint == "one direction at a time"
    free = free_memory()
    assert free is None or free > 10_000_000
    assert 10_000_000 < held() < 100_000_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="another allocator")
@pytest.mark.parametrize(
    "options",
    [("--both", "--recipe", "ridge", "--k", "6"), ("--distill", "2", "--k", "6")],
    ids=["moments", "gradients"],
)
def test_a_fit_peaks_where_it_said_it_would(tmp_path: Path, options: tuple[str, ...]) -> None:
    peak = peak_of_fit([*given(12, 512, 2), *options], tmp_path)
    assert 0.9 < peak.used / peak.bound <= 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="another allocator")
def test_a_resumed_fit_peaks_where_it_said_it_would(tmp_path: Path) -> None:
    peak = peak_of_resumed([*given(12, 512, 2), "--both", "--recipe", "ridge", "--k", "6"], tmp_path)
    assert 0.9 < peak.used / peak.bound <= 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="another allocator")
def test_networks_peak_where_the_fit_said_they_would(tmp_path: Path) -> None:
    options = ["--family", "mlp", "--hidden", "256,256", "--k", "2", "--epochs", "1"]
    peak = peak_of_fit([*given(20, 256, 1), *options], tmp_path)
    assert peak.stage == "trains networks"
    assert 0.9 < peak.used / peak.bound <= 1.0


def given(sequences: int, length: int, stride: int) -> list[str]:
    """The shipped pair and text."""
    said = [*(str(ROOT / "models" / name) for name in ("small", "large")), "--dtype", "float32"]
    said += ["--text", str(ROOT / "demo/text/wikipedia.txt"), "--sequences", str(sequences)]
    return [*said, "--length", str(length), "--stride", str(stride)]
