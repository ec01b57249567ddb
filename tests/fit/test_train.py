"""`kvhub fit --distill` and `--family mlp`, from the command line to evidence."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fitting import Pair

from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import read_manifest
from kvhub.cli import run
from kvhub.mapper import Mapper
from kvhub.mapper.mlp import MlpMapper

MLP = ["--family", "mlp", "--hidden", "8,6", "--epochs", "3"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.make(tmp_path_factory.mktemp("pair"), documents=400)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVHUB_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVHUB_DATABASE_URL", raising=False)
    return tmp_path / "home"


def fitted(pair: Pair, output: Path, *more: str) -> list[Manifest]:
    assert run([*pair.arguments(*more), "--output", str(output)]) == 0
    return [read_manifest(path) for path in sorted(output.iterdir())]


def test_networks_are_fitted_evaluated_and_loaded(pair: Pair, tmp_path: Path) -> None:
    one, two = fitted(pair, tmp_path / "m", *MLP, "--both")
    for manifest in (one, two):
        assert manifest.family == "mlp" and manifest.perceptron is not None
        assert (manifest.perceptron.hidden, manifest.perceptron.per) == ([8, 6], "head")
        assert manifest.training is not None and len(manifest.training.curve) == 3
        assert manifest.training.curve[-1] < manifest.training.curve[0]
    directory = min((tmp_path / "m").iterdir())
    assert isinstance(Mapper.from_pretrained(directory), MlpMapper)
    given = ["--text", pair.text, "--source", pair.source, "--target", pair.target]
    if one.source.name != "one":
        given = ["--text", pair.text, "--source", pair.target, "--target", pair.source]
    run(["eval", str(directory), *given, "--windows", "4", "--prefix", "32", "--tail", "16"])
    evidence = read_evidence(directory, one)
    assert evidence is not None and evidence.windows == 4
    assert {score.metric for score in evidence.scores} >= {"kl", "nll", "top1"}


def test_a_distilled_mapper_is_a_ridge_with_a_record(pair: Pair, tmp_path: Path, home: Path) -> None:
    (plain,) = fitted(pair, tmp_path / "plain")
    (manifest,) = fitted(pair, tmp_path / "m", "--distill", "4")
    assert manifest.family == plain.family == "ridge" and plain.training is None
    assert manifest.size - plain.size < 4096  # the same tensors
    training = manifest.training
    assert training is not None and (training.steps, len(training.curve)) == (4, 4)
    assert manifest.objective == training.objective == "kl-through-target"
    assert training.before is not None and training.after is not None and training.after <= training.before
    assert not list((home / "cache" / "fits").iterdir())  # checkpoint and captures are gone


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--family", "mlp", "--distill", "3"], "ridge family"),
        (["--family", "mlp", "--hidden", "8"], "two numbers"),
        (["--family", "mlp", "--epochs", "0"], "epoch"),
        (["--family", "mlp", "--support", "head-local", "--networks", "layer"], "one network a head"),
    ],
)
def test_what_cannot_be_is_refused(
    pair: Pair, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(pair.arguments(*more)) not in (0, 70)
    assert said in capsys.readouterr().err
