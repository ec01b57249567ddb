"""Keys through the target's k_norm: what is solved, stored, and refused; and end to end."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.fitting import Pair
from support.prose import write_text
from support.tiny import make_tiny
from torch import Tensor

from kvhub.artifact.read import read_manifest
from kvhub.artifact.write import write_artifact
from kvhub.cli import run
from kvhub.errors import BadInput, Corrupt, Incompatible
from kvhub.fit.calibration import CalibrationSet, calibration_set, load_corpora
from kvhub.fit.capture import capture
from kvhub.fit.checkpoint import fit_key
from kvhub.fit.mlp import MlpSettings
from kvhub.fit.recipes.choice import Choice
from kvhub.fit.recipes.normalise import check_norms, inverse, norms_for, unscaled
from kvhub.fit.recipes.search import search
from kvhub.fit.ridge import Affine
from kvhub.fit.run import fit_pair, fit_sides
from kvhub.fit.settings import DEFAULT_RECIPE, FitSettings
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
    sides, window = (Side.of(source), Side.of(target)), windows.fit[0]
    assert norms_for(sides[0], SETTINGS, window) is None
    norms = norms_for(sides[1], SETTINGS, window)
    assert norms is not None and norms.shape == (4, 24)
    assert norms_for(sides[1], replace(SETTINGS, normalise_keys="off"), window) is None
    check_norms(sides[1], norms, window)
    with pytest.raises(Incompatible, match="layer 2 are not normalised") as caught:
        check_norms(sides[1], torch.cat((norms[:2], 2 * norms[2:])), windows.fit[0])
    assert caught.value.code == "k_norm"
    forced = replace(SETTINGS, normalise_keys="on")
    for pair, both in ((sides[::-1], False), (sides, True)):
        with pytest.raises(Incompatible, match="has no k_norm"):
            fit_pair(*(source if side is sides[0] else target for side in pair), windows, forced, both=both)
    with pytest.raises(BadInput, match="ridge family"):
        replace(SETTINGS, train=MlpSettings())


class Odd(Side):
    """A target whose k_norm is something else than its files or its keys say."""

    def __init__(self, like: LoadedModel, norms: Tensor | Exception) -> None:
        super().__init__(like.identity, model=like, path=like.path)
        self.odd = norms

    @property
    def k_norm(self) -> Tensor:  # type: ignore[override]
        if isinstance(self.odd, Exception):
            raise self.odd
        return self.odd


def whole_layer(target: LoadedModel) -> LoadedModel:
    """The target with one norm over all heads at once, as OLMo2 has it."""
    model = copy.deepcopy(target.model)
    for layer in model.model.layers:
        layer.self_attn.k_norm.forward = all_heads(layer.self_attn.k_norm.weight)
    return replace(target, model=model)


def all_heads(weight: Tensor) -> Callable[[Tensor], Tensor]:
    def forward(keys: Tensor) -> Tensor:  # [batch, tokens, heads, head_dim]
        return weight * keys * keys.square().mean((-1, -2), keepdim=True).rsqrt()

    return forward


def test_another_norm_is_left_alone(ready: Ready) -> None:
    """`auto` stretches keys and says why; `on` refuses; nothing else is hidden by it."""
    _, target, windows = ready
    window, norms = windows.fit[0], Side.of(target).k_norm
    zero = torch.cat((norms[:1], torch.zeros(3, 24)))
    nothing = torch.full_like(norms, float("nan"))
    shape = Incompatible("tiny has no k_norm of one weight a dimension", code="k_norm")
    default = replace(SETTINGS, **DEFAULT_RECIPE)
    for side, why in (
        (Odd(whole_layer(target), norms), "in layer 0 are not normalised"),
        (Odd(target, zero), "in layer 1 are not normalised"),
        (Odd(target, nothing), "in layer 0 are not normalised"),
        (Odd(target, shape), "no k_norm of one weight"),
    ):
        for settings, begins in (
            (default, "note: mapped keys are stretched, not normalised: "),
            (SETTINGS, "note: mapped keys are not normalised: "),
        ):
            said: list[str] = []
            assert norms_for(side, settings, window, said.append) is None
            (line,) = said
            assert line.startswith(begins) and why in line and "\n" not in line
            with pytest.raises(Incompatible, match=why) as caught:
                norms_for(side, replace(settings, normalise_keys="on"), window)
            assert caught.value.code == "k_norm" and caught.value.hint in ("", "use --normalise-keys off")
    for other in (Corrupt("it cannot be read"), Incompatible("it changed", code="changed")):
        with pytest.raises(type(other)):
            norms_for(Odd(target, other), SETTINGS, window)


def test_a_fit_goes_on_without(ready: Ready) -> None:
    """The whole fit of such a target is that of `--normalise-keys off`, and a line is said."""
    source, target, windows = ready
    settings = replace(SETTINGS, recipe="default", **DEFAULT_RECIPE)
    odd = Odd(whole_layer(target), Side.of(target).k_norm)
    said: list[str] = []
    (fitted,) = fit_sides(Side.of(source), odd, windows, settings, say=said.append)
    assert len(said) == 1 and said[0].startswith("note: mapped keys are stretched")
    off = replace(settings, normalise_keys="off")
    (plain,) = fit_sides(Side.of(source), odd, windows, off, say=said.append)
    assert len(said) == 1 and fitted.manifest == plain.manifest and fitted.manifest.family == "ridge"
    assert fitted.manifest.recipe == "default: first row x1, keys stretched 0.5, values 0.5"
    assert all(torch.equal(plain.tensors[name], fitted.tensors[name]) for name in plain.tensors)
    with pytest.raises(Incompatible, match="not normalised by its k_norm"):
        fit_sides(Side.of(source), odd, windows, replace(settings, normalise_keys="on"))


def test_a_search_may_choose_it(ready: Ready) -> None:
    shapes = ready[0].identity.geometry, ready[1].identity.geometry
    from kvhub.artifact.manifest import CurvePoint

    def measure(choice: Choice) -> CurvePoint:
        return CurvePoint(
            k=choice.k, regularization=choice.regularization.value, attention_cosine=0.9,
            attention_cosine_worst=0.8, kl=1.0 - 0.5 * choice.normalise, top1=0.5,
        )  # fmt: skip

    best, _ = search(Choice(2), *shapes, measure, tries=24, normalise=True)
    assert best.normalise and best.label().endswith("keys normalised")
    for found, tried in (
        search(Choice(2), *shapes, measure, tries=24),
        search(Choice(2), *shapes[::-1], measure, tries=24, normalise=True),
    ):
        assert not found.normalise and len(tried) > 5


@pytest.mark.parametrize(
    ("options", "family", "said"),
    [
        ((), "ridge-k-norm", "keys normalised, values stretched 0.5"),
        (("--support", "head-local"), "ridge-k-norm", "keys normalised, values stretched 0.5"),
        (("--normalise-keys", "off"), "ridge", "keys stretched 0.5, values 0.5"),
        (("--recipe", "ridge"), "ridge", None),
        (("--recipe", "ridge", "--normalise-keys", "auto"), "ridge", None),
        (("--recipe", "paper"), "ridge", "paper"),
        (("--recipe", "ridge", "--normalise-keys", "on"), "ridge-k-norm", None),
        (("--family", "mlp", "--hidden", "4,4", "--epochs", "1"), "mlp", None),
    ],
)
def test_what_the_recipes_do_unasked(
    tmp_path: Path, options: tuple[str, ...], family: str, said: str | None
) -> None:
    pair = Pair.make(tmp_path)
    given = ["--recipe", "default", "--distill", "0"] if "--recipe" not in options else []
    if family == "mlp":
        given = ["--recipe", "default"]
    given += ["--dtype", "float32", "--output", str(tmp_path / "out"), *options]
    assert run(pair.arguments(*given)) == 0
    (directory,) = (tmp_path / "out").iterdir()
    manifest = read_manifest(directory)
    assert manifest.family == family
    assert manifest.recipe == said or (said is not None and (manifest.recipe or "").endswith(said))


def test_a_target_without_one_is_as_before(tmp_path: Path) -> None:
    pair = Pair.make(tmp_path)
    plain = str(make_tiny(tmp_path / "plain", model_type="qwen2"))
    found = []
    for option in ("auto", "off"):
        out = tmp_path / option
        arguments = [
            "fit",
            pair.source,
            plain,
            *pair.arguments()[3:],
            "--recipe",
            "default",
            "--distill",
            "0",
        ]
        arguments += ["--dtype", "float32", "--normalise-keys", option, "--output", str(out)]
        assert run(arguments) == 0
        (directory,) = out.iterdir()
        found.append((read_manifest(directory), (directory / "model.safetensors").read_bytes()))
    assert found[0][0].family == "ridge" and found[0][1] == found[1][1]
    assert found[0][0].recipe == found[1][0].recipe == "default: first row x1, keys stretched 0.5, values 0.5"


def test_a_checkpoint_of_other_keys_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that are normalised, or may be, are another fit: another key, another checkpoint."""
    keys = {
        fit_key(replace(FitSettings(**DEFAULT_RECIPE), normalise_keys=how).describe())
        for how in ("auto", "on", "off")
    }
    assert len(keys) == 3

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    pair = Pair.make(tmp_path)
    arguments = pair.arguments("--recipe", "default", "--distill", "0", "--dtype", "float32")
    arguments += ["--checkpoint", str(tmp_path / "progress"), "--output", str(tmp_path / "out")]
    arguments += ["--checkpoint-every", "1"]
    with monkeypatch.context() as patch:
        patch.setattr("kvhub.fit.run.solve_pair", killed)
        assert run([*arguments, "--normalise-keys", "off"]) == 130
    capsys.readouterr()
    assert run(arguments) == 2
    assert "normalise_keys" in capsys.readouterr().err


def test_the_command_says_why_it_goes_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One layer's weights are zero in the file: a model whose attention there sees no key."""
    pair = Pair.make(tmp_path)
    (file,) = Path(pair.target).glob("*.safetensors")
    name = "model.layers.1.self_attn.k_norm.weight"
    save_file(load_file(file) | {name: torch.zeros(24)}, file, {"format": "pt"})
    arguments = pair.arguments("--dtype", "float32", "--recipe", "default", "--distill", "0")
    assert run([*arguments, "--output", str(tmp_path / "out")]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "mapped keys" in line]
    assert notes == [
        "note: mapped keys are stretched, not normalised:"
        " the keys of two in layer 1 are not normalised by its k_norm"
    ]
    (directory,) = (tmp_path / "out").iterdir()
    assert read_manifest(directory).family == "ridge"
    assert run([*arguments, "--normalise-keys", "on"]) == 7
    assert "use --normalise-keys off" in capsys.readouterr().err


def test_one_that_goes_on_has_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair.make(tmp_path)

    def arguments(name: str) -> list[str]:
        given = pair.arguments("--recipe", "default", "--distill", "2", "--dtype", "float32", "--both")
        return [*given, "--checkpoint-every", "5", "--checkpoint", str(tmp_path / f"{name}-progress"),
                "--output", str(tmp_path / name)]  # fmt: skip

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    assert run(arguments("whole")) == 0
    for place in ("kvhub.fit.run.solve_pair", "kvhub.fit.distill.run.folded", "kvhub.fit.run.held_out_score"):
        with monkeypatch.context() as patch:
            patch.setattr(place, killed)
            assert run(arguments("parts")) == 130
    assert run(arguments("parts")) == 0
    whole, parts = (sorted((tmp_path / name).iterdir()) for name in ("whole", "parts"))
    assert len(whole) == len(parts) == 2
    for one, other in zip(whole, parts, strict=True):
        assert read_manifest(one).family == "ridge-k-norm" and read_manifest(one).training is not None
        assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


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
