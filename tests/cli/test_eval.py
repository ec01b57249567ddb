"""`kvhub eval` end to end on the trained pair that ships with the project."""

import json
from pathlib import Path

import pytest
from support.mappers import identity_tensors, make_manifest, random_tensors

from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.read import read_manifest
from kvhub.artifact.write import write_artifact
from kvhub.catalog import find, register
from kvhub.cli import run
from kvhub.evaluation.gate import rejudge
from kvhub.model.identify import identify

ROOT = Path(__file__).parents[2]
SMALL, LARGE = ROOT / "models" / "small", ROOT / "models" / "large"
TEXT = ROOT / "demo" / "text" / "wikipedia.txt"
QUICK = ("--windows", "16", "--prefix", "64", "--tail", "64")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVHUB_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVHUB_DATABASE_URL", raising=False)
    return tmp_path


def artifact(directory, source=SMALL, target=SMALL, tensors=identity_tensors):
    manifest = make_manifest(identify(source, dtype="float32"), identify(target, dtype="float32"), k=1)
    return write_artifact(directory, manifest, tensors(manifest))


def evaluate(mapper, *more, source=SMALL, target=SMALL):
    texts = ["--text", str(TEXT)]
    return run(["eval", str(mapper), *texts, "--source", str(source), "--target", str(target), *more])


def test_a_good_mapper_becomes_ready_with_its_evidence(home, capsys):
    manifest = artifact(home / "mapper")
    assert evaluate(home / "mapper", *QUICK) == 0
    out = capsys.readouterr().out
    assert "passed the gate: 16 windows" in out
    assert "1.000 [1.000, 1.000]" in out
    row = find(manifest.digest[:12])  # it was not registered before
    assert row.state == "ready"
    assert row.score("top1") == 1.0
    assert row.score("nll", "wrong-document") > row.score("nll")
    evidence = read_evidence(home / "mapper", read_manifest(home / "mapper"))
    assert evidence.score("nll").n == 16 * 63
    assert rejudge(evidence, manifest) == evidence.verdict


def test_a_random_mapper_stays_a_draft_and_says_why(home, capsys):
    manifest = artifact(home / "mapper", target=LARGE, tensors=random_tensors)
    register(home / "mapper", manifest)
    assert evaluate(manifest.digest[:10], *QUICK, "--format", "json", target=LARGE) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["mapper"] == manifest.digest
    assert not record["verdict"]["passed"]
    row = find(manifest.digest)
    assert row.state == "draft"
    assert row.state_reason.startswith("gate: top1")


def test_another_model_is_refused_before_anything_is_written(home, capsys):
    artifact(home / "mapper")
    assert evaluate(home / "mapper", *QUICK, target=LARGE) == 7
    error = capsys.readouterr().err
    assert error.startswith("Error: the target large is not the mapper's small: its revision differs")
    assert "Traceback" not in error
    assert not (home / "mapper" / "evidence.json").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--text", "{home}/absent.txt"), 3, "no such text file"),
        (("--text", "{home}/short.txt"), 2, "short: its held-out tenth gives 0 windows of 128 tokens"),
        (("--text", "{home}/binary.txt"), 2, "binary.txt is binary"),
        (("--text", str(TEXT), "--windows", "3"), 2, "3 windows are too few for 2 texts"),
        (("--exact-prefix", "64"), 2, "leaves nothing to map"),
        (("--tail", "1"), 2, "Invalid value for '--tail'"),
    ],
)
def test_bad_input_is_one_line(home, capsys, arguments, code, message):
    artifact(home / "mapper")
    (home / "short.txt").write_text("One line.\n\nAnother one.\n")
    (home / "binary.txt").write_bytes(b"\0\1\2" * 100)
    given = [argument.format(home=home) for argument in arguments]
    assert evaluate(home / "mapper", *QUICK, *given) == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_models_that_were_directories_must_be_named(home, capsys):
    artifact(home / "mapper")
    assert run(["eval", str(home / "mapper"), "--text", str(TEXT)]) == 2
    assert "Hint: give --source DIR" in capsys.readouterr().err
    assert run(["eval", "nothing-like-it", "--text", str(TEXT)]) == 3
