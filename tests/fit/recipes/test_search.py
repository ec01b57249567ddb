"""`--recipe best`: what is tried, what is kept, and what the manifest says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fitting import Pair

from kvhub.artifact.manifest import CurvePoint, Manifest
from kvhub.artifact.read import verify_artifact
from kvhub.cli import run
from kvhub.errors import KvhubError
from kvhub.fit.recipes.choice import Choice
from kvhub.fit.recipes.search import search
from kvhub.fit.ridge import Regularization
from kvhub.model.identity import Geometry

SHAPE = Geometry(
    num_layers=6, num_attention_heads=4, num_kv_heads=2, head_dim=4, hidden_size=16, k_norm=False
)


def point(choice: Choice, kl: float) -> CurvePoint:
    return CurvePoint(
        k=choice.k, regularization=choice.regularization.value, attention_cosine=0.9,
        attention_cosine_worst=0.8, kl=kl, top1=0.5,
    )  # fmt: skip


def test_finds_what_is_best_and_costs_no_more() -> None:
    wanted = Choice(4, Regularization(3e-4), "head-local")

    def measure(choice: Choice) -> CurvePoint:
        far = (choice.support != wanted.support) + (choice.regularization != wanted.regularization)
        return point(choice, 1.0 + far + choice.off_head / 100 + choice.stretch_keys)

    start = Choice(2)
    best, tried = search(start, SHAPE, SHAPE, measure, tries=24)
    assert best == wanted
    assert best.flops(SHAPE, SHAPE) == start.flops(SHAPE, SHAPE)
    assert len(tried) == 6  # plain, head-local, four lambdas: the rest is for full support
    best, tried = search(start, SHAPE, SHAPE, measure, tries=2)
    assert len(tried) == 2 and best.regularization == Regularization()


def test_what_cannot_be_solved_is_left_out() -> None:
    def measure(choice: Choice) -> CurvePoint:
        if choice.regularization.value < 1e-2:
            raise KvhubError("not positive definite")
        return point(choice, 1.0)

    best, tried = search(Choice(2), SHAPE, SHAPE, measure, tries=24)
    assert best.regularization.value == 1e-2 and all(p.regularization == 1e-2 for p in tried)

    def never(choice: Choice) -> CurvePoint:
        raise KvhubError("not positive definite")

    with pytest.raises(KvhubError, match="positive"):
        search(Choice(2), SHAPE, SHAPE, never, tries=24)


def test_a_fit_says_what_it_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = Pair.make(tmp_path)
    arguments = pair.arguments("--recipe", "best", "--dtype", "float32", "--captures", str(tmp_path / "cap"))
    found = []
    for name in ("a", "b"):
        assert run([*arguments, "--output", str(tmp_path / name)]) == 0
        (directory,) = (tmp_path / name).iterdir()
        found.append(verify_artifact(directory, deep=True))
    one, two = found
    assert [f.sha256 for f in one.files] == [f.sha256 for f in two.files]  # nothing in it is drawn
    assert one.selection == two.selection and one.recipe == two.recipe and one.selection is not None
    assert one.recipe is not None and one.recipe.startswith("best: ")
    curve = one.selection.curve
    assert len(curve) == len({p.recipe for p in curve}) >= 10
    assert one.training is not None and one.training.steps == 60  # the last axis: the start is kept or beaten
    label = one.recipe.removeprefix("best: ")
    assert next(p for p in curve if p.recipe == label).kl <= min(p.kl for p in curve) / (1 - 0.002) ** 5
    assert "recipe   best: " in capsys.readouterr().out
    assert Manifest.model_validate_json(one.to_bytes()).to_bytes() == one.to_bytes()
    assert run([*arguments, "--k", "auto"]) == 2
    assert run([*arguments, "--tries", "2", "--distill", "0", "--output", str(tmp_path / "c")]) == 0
    (directory,) = (tmp_path / "c").iterdir()
    few = verify_artifact(directory, deep=True)
    assert few.selection is not None and few.selection.curve == curve[:2] and few.training is None


def test_the_papers_recipe(tmp_path: Path) -> None:
    pair = Pair.make(tmp_path)
    arguments = pair.arguments("--dtype", "float32", "--recipe", "paper", "--output", str(tmp_path / "out"))
    assert run([*arguments, "--lambda", "1e-3"]) == 2
    assert run(arguments) == 0
    (directory,) = (tmp_path / "out").iterdir()
    manifest = json.loads((directory / "manifest.json").read_bytes())
    assert manifest["recipe"] == "paper"
    assert (manifest["regularization"], manifest["regularization_convention"]) == (0.01, "absolute-mean")
    assert "selection" not in manifest


def test_the_default_recipe_says_what_it_did(tmp_path: Path) -> None:
    pair = Pair.make(tmp_path)
    arguments = pair.arguments("--dtype", "float32", "--recipe", "default", "--output", str(tmp_path / "out"))
    assert run(arguments) == 0
    (directory,) = (tmp_path / "out").iterdir()
    # random models have no sink, and these a k_norm
    expected = "default: first row x1, keys normalised, values stretched 0.5"
    assert verify_artifact(directory, deep=True).recipe == expected
