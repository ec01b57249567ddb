"""Keys through the target's k_norm: what is solved, stored, and refused; and end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.fitting import Pair
from support.prose import write_text
from support.tiny import make_tiny

from kvhub.artifact.read import read_manifest
from kvhub.artifact.write import write_artifact
from kvhub.cli import run
from kvhub.errors import BadInput, Incompatible
from kvhub.fit.calibration import CalibrationSet, calibration_set, load_corpora
from kvhub.fit.capture import capture
from kvhub.fit.mlp import MlpSettings
from kvhub.fit.recipes.choice import Choice
from kvhub.fit.recipes.normalise import check_norms, inverse, norms_of, unscaled
from kvhub.fit.recipes.search import search
from kvhub.fit.ridge import Affine
from kvhub.fit.run import fit_pair
from kvhub.fit.settings import FitSettings
from kvhub.fit.side import Side
from kvhub.mapper import Mapper, SourceRows
from kvhub.model.load import LoadedModel, load_model

SETTINGS = FitSettings(
    k=2, sequences=24, length=64, stride=2, store_dtype="float32", normalise_keys="auto",
    created="2026-01-01T00:00:00+00:00",
)  # fmt: skip
Ready = tuple[LoadedModel, LoadedModel, CalibrationSet]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Ready:
    """A source without k_norm, a target with one."""
    root = tmp_path_factory.mktemp("pair")
    source = load_model(make_tiny(root / "source", model_type="qwen2"), torch.float32)
    target = load_model(make_tiny(root / "target", layers=4, head_dim=24, seed=1), torch.float32)
    corpora = load_corpora([write_text(root / "text.txt", 400)])
    return source, target, calibration_set(corpora, source.tokenizer, sequences=24, length=64)


def test_unscaled_is_the_map_before_the_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    norm = torch.tensor([2.0, -0.5, 0.0, 1e-9])
    x = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    for shape in ((6, 8), (2, 3, 4)):  # all heads, a head each
        weight = torch.randn(shape, generator=generator, dtype=torch.float64)
        mean_y = torch.randn(shape[-1] if len(shape) == 2 else shape[::2], generator=generator).double()
        mean_x = torch.zeros(shape[:-1], dtype=torch.float64)
        found = unscaled(Affine(weight, mean_x, mean_y), norm)
        rows = x if len(shape) == 2 else x.view(5, 2, 3).transpose(0, 1)
        before = (rows @ weight + mean_y[..., None, :]).reshape(-1, 2, 4)[..., :2]
        after = (rows @ found.weight + found.mean_y[..., None, :]).reshape(-1, 2, 4)
        torch.testing.assert_close(after[..., :2] * norm[:2], before)
        assert not after[..., 2:].any()  # what the weight hides is left out
    assert inverse(norm).tolist() == [0.5, -2.0, 0.0, 0.0]


@pytest.mark.parametrize("support", ["full", "head-local"])
def test_mapped_keys_have_the_targets_lengths(ready: Ready, tmp_path: Path, support: str) -> None:
    source, target, windows = ready
    plain = fit_pair(source, target, windows, replace(SETTINGS, support=support, normalise_keys="off"))[0]
    (fitted,) = fit_pair(source, target, windows, replace(SETTINGS, support=support))
    assert (plain.manifest.family, fitted.manifest.family) == ("ridge", "ridge-k-norm")
    write_artifact(tmp_path / "m", fitted.manifest, fitted.tensors)
    mapper = Mapper.from_pretrained(tmp_path / "m")
    window = windows.held_out[0]
    seen = capture(source, window)
    rows = SourceRows(seen.keys, seen.values, torch.arange(len(window)), source.identity.rope)
    for layer, own in enumerate(target.model.model.layers):
        keys, values = mapper.map_layer(layer, rows)
        # A rotation keeps the length of each pair only; all pairs are rotated: so that of the whole key
        # over the weight is not 1, but the weight's own pairs say what it must be.
        content = torch.cat(
            [seen.content_keys[n].flatten(1) for n in fitted.manifest.source_layers[layer]], 1
        )
        if support == "full":
            name = f"layers.{layer}.k"
            before = (content @ fitted.tensors[f"{name}.weight"]).view(keys.shape) + fitted.tensors[
                f"{name}.bias"
            ]
            wanted = own.self_attn.k_norm(before)
            torch.testing.assert_close(keys.norm(dim=-1), wanted.norm(dim=-1), rtol=1e-4, atol=1e-4)
        columns = plain.tensors[f"layers.{layer}.v.weight"]
        assert torch.equal(columns, fitted.tensors[f"layers.{layer}.v.weight"])
        assert values.isfinite().all()
    assert fitted.manifest.fit_scores.r2_value == plain.manifest.fit_scores.r2_value
    assert fitted.manifest.fit_scores.r2_key != plain.manifest.fit_scores.r2_key


def test_which_targets_have_it(ready: Ready) -> None:
    source, target, windows = ready
    sides = Side.of(source), Side.of(target)
    assert norms_of(sides[0], SETTINGS) is None
    norms = norms_of(sides[1], SETTINGS)
    assert norms is not None and norms.shape == (4, 24)
    assert norms_of(sides[1], replace(SETTINGS, normalise_keys="off")) is None
    check_norms(sides[1], norms, windows.fit[0])
    with pytest.raises(Incompatible, match="layer 2 are not normalised") as caught:
        check_norms(sides[1], torch.cat((norms[:2], 2 * norms[2:])), windows.fit[0])
    assert caught.value.code == "k_norm"
    forced = replace(SETTINGS, normalise_keys="on")
    for pair, both in ((sides[::-1], False), (sides, True)):
        with pytest.raises(Incompatible, match="has no k_norm"):
            fit_pair(*(source if side is sides[0] else target for side in pair), windows, forced, both=both)
    with pytest.raises(BadInput, match="ridge family"):
        replace(SETTINGS, train=MlpSettings())


def test_a_search_may_choose_it(ready: Ready) -> None:
    shapes = ready[0].identity.geometry, ready[1].identity.geometry
    from kvhub.artifact.manifest import CurvePoint

    def measure(choice: Choice) -> CurvePoint:
        return CurvePoint(
            k=choice.k, regularization=choice.regularization.value, attention_cosine=0.9,
            attention_cosine_worst=0.8, kl=1.0 - 0.5 * choice.normalise, top1=0.5,
        )  # fmt: skip

    best, _ = search(Choice(2), *shapes, measure, normalise=True)
    assert best.normalise and best.label().endswith("keys normalised")
    for found, tried in (
        search(Choice(2), *shapes, measure),
        search(Choice(2), *shapes[::-1], measure, normalise=True),
    ):
        assert not found.normalise and len(tried) > 5


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = Pair.make(tmp_path)
    arguments = pair.arguments(
        "--dtype", "float32", "--normalise-keys", "on", "--recipe", "default", "--distill", "2"
    )
    assert run([*arguments, "--output", str(tmp_path / "out")]) == 0
    (directory,) = (tmp_path / "out").iterdir()
    manifest = read_manifest(directory)
    assert manifest.family == "ridge-k-norm" and manifest.training is not None
    assert manifest.recipe is not None and manifest.recipe.endswith("keys normalised, values stretched 0.5")
    assert json.loads((directory / "config.json").read_bytes())["family"] == "ridge-k-norm"
    capsys.readouterr()
    assert run([*arguments, "--family", "mlp"]) == 2
    plain = str(make_tiny(tmp_path / "plain", model_type="qwen2"))
    assert run(["fit", pair.source, plain, *arguments[3:]]) == 7
    assert "has no k_norm" in capsys.readouterr().err
