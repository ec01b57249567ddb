"""Some target layers at a time, over captures on disk: the same mapper up to the last bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.fitting import Pair
from support.prose import write_text
from support.tiny import make_tiny

from kvhub.artifact.read import open_tensors, verify_artifact
from kvhub.cli import run
from kvhub.errors import BadInput
from kvhub.fit.blocks import block_bytes, layers_at_once
from kvhub.fit.budget import budget
from kvhub.fit.calibration import calibration_set, load_corpora
from kvhub.fit.captures import CaptureStore
from kvhub.fit.run import Fitted, fit_pair, fit_sides
from kvhub.fit.settings import FitSettings
from kvhub.fit.side import Side
from kvhub.model.identity import Geometry
from kvhub.model.load import load_model


def close(one: Fitted, other: Fitted) -> None:
    assert one.manifest.source_layers == other.manifest.source_layers
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(other.tensors[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("support", ["full", "head-local"])
@pytest.mark.parametrize("layers", [1, 3])
def test_blocks_give_the_fit_in_one_piece(tmp_path: Path, support: str, layers: int) -> None:
    one = load_model(make_tiny(tmp_path / "one", layers=5), torch.float32)
    two = load_model(make_tiny(tmp_path / "two", layers=4, head_dim=24, seed=1), torch.float32)
    windows = calibration_set(
        load_corpora([write_text(tmp_path / "text.txt", 300)]),
        one.tokenizer,
        sequences=40,
        length=64,
        lengths=[64, 32],
    )
    settings = FitSettings(
        k=2,
        support=support,  # type: ignore[arg-type]
        sequences=40,
        length=64,
        lengths=(64, 32),
        stride=1,
        exact_prefix=0 if layers == 1 else 3,
        first_weight=64 if layers == 1 else 1,  # without an exact prefix, which leaves no first row
        store_dtype="float32",
        normalise_keys="on" if layers == 3 else "off",
        created="2026-01-01T00:00:00+00:00",
    )
    whole = fit_pair(one, two, windows, settings, both=True)
    sides = []
    for model in (one, two):
        store = CaptureStore(tmp_path / "captures", model.identity)
        store.prepare()
        sides.append(Side.of(model, store))
    parts = fit_sides(*sides, windows, settings, both=True, low_memory=True, layers=layers)
    assert len(parts) == len(whole) == 2
    for part, piece in zip(parts, whole, strict=True):
        close(piece, part)
        assert part.manifest.fit_scores.r2_key == pytest.approx(piece.manifest.fit_scores.r2_key, abs=1e-4)


def shape(layers: int, heads: int, dim: int) -> Geometry:
    return Geometry(
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        hidden_size=8,
        k_norm=False,
    )


def test_a_pair_of_75_gb_fits_in_24() -> None:
    source, target, settings = shape(40, 8, 128), shape(64, 8, 128), FitSettings()
    assert budget(source, target, settings, both=False).total > 70e9
    layers = layers_at_once(source, target, settings, 24_000_000_000)
    assert layers is not None and layers >= 2
    assert block_bytes(source, target, settings, layers) <= 24e9
    assert block_bytes(source, target, settings, layers + 1) > 24e9
    assert layers_at_once(source, target, settings, 5_000_000_000) is None


def test_the_command_takes_blocks_where_memory_is_short(
    tmp_path: Path, kvhub_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvhub.fit.command as command
    from kvhub.fit.budget import Budget

    pair = Pair.make(tmp_path)
    given = ["--store-dtype", "float32", "--captures", str(tmp_path / "captures")]
    assert run(pair.arguments(*given)) == 0
    (first,) = (kvhub_home / "mappers").iterdir()
    # The models are so small that memory cannot really be short: what is not a block counts as too large.
    whole = property(lambda self: 10**12 if "adds up moments" in self.stages else 0)
    monkeypatch.setattr(Budget, "total", whole)
    monkeypatch.setattr(command, "held", lambda: 600_000_000)
    assert run(pair.arguments(*given, "--max-memory", "0.72", "--seed", "0")) == 0
    error = capsys.readouterr().err
    assert "target layers at a time" in error and "solving blocks of layers" in error
    (second,) = (path for path in (kvhub_home / "mappers").iterdir() if path != first)
    one, other = (open_tensors(path, verify_artifact(path, deep=True)) for path in (first, second))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5)
    assert run(pair.arguments("--k", "auto", *given, "--max-memory", "0.72")) == 2  # needs all at once


def test_choosing_needs_all_moments(tmp_path: Path) -> None:
    from kvhub.fit.blocks import solve_in_blocks

    model = load_model(make_tiny(tmp_path / "m"), torch.float32)
    side = Side.of(model, CaptureStore(tmp_path, model.identity))
    with pytest.raises(BadInput, match="all moments in memory at once"):
        solve_in_blocks(side, side, [], FitSettings(k="auto"), 1, lambda stage, done, total: None)
