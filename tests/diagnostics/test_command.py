"""`kvhub diagnose` beside `kvhub eval` and `kvhub report`, on a tiny pair."""

import json
from pathlib import Path

import pytest
from support.fitting import Pair
from support.mappers import make_manifest, random_tensors

from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.read import read_manifest, verify_artifact
from kvhub.artifact.write import write_artifact
from kvhub.catalog import find, register
from kvhub.cli import run
from kvhub.diagnostics.record import read_diagnostics
from kvhub.model.identify import identify

QUICK = ("--windows", "4", "--prefix", "24", "--tail", "8")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair.make(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def mapper(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("KVHUB_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVHUB_DATABASE_URL", raising=False)
    made = make_manifest(*(identify(Path(model), dtype="float32") for model in pair[:2]))
    write_artifact(tmp_path / "mapper", made, random_tensors(made))
    return tmp_path / "mapper"


def kvhub(command, mapper, pair, *more):
    given = ["--text", pair.text, "--source", pair.source, "--target", pair.target]
    return run([command, str(mapper), *given, *more])


def test_the_scores_join_the_evidence_of_the_same_windows(pair, mapper, capsys):
    assert kvhub("eval", mapper, pair, *QUICK) == 0
    manifest = read_manifest(mapper)
    before = read_evidence(mapper, manifest)
    capsys.readouterr()
    assert kvhub("diagnose", mapper, pair, *QUICK) == 0
    out, err = capsys.readouterr()
    assert "K error concentration" in out and "ERROR BY POSITION" in out
    assert "16-23" in out and "other windows" not in err
    found = read_diagnostics(mapper, manifest)
    after = read_evidence(mapper, manifest)
    assert after.score("k_error_concentration") == found.score("k_error_concentration")
    assert set(before.scores) < set(after.scores)  # nothing that eval measured was replaced
    assert after.verdict == before.verdict
    row = find(manifest.digest)
    assert row.state == "draft"
    assert row.score("k_error_concentration") == pytest.approx(found.score("k_error_concentration").value)
    assert row.score("nll") == pytest.approx(before.score("nll").value)
    assert verify_artifact(mapper, deep=True) == manifest  # nothing that does not belong there


def test_the_scores_of_other_windows_stay_apart(pair, mapper, capsys):
    assert kvhub("eval", mapper, pair, *QUICK) == 0
    before = (mapper / "evidence.json").read_bytes()
    capsys.readouterr()
    for other in (("--windows", "3"), ("--tail", "9", "--prefix", "23")):  # the latter: the very same tokens
        assert kvhub("diagnose", mapper, pair, *QUICK, *other, "--no-maps", "--format", "json") == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["maps"] is None
        assert "of other windows" in err
        assert (mapper / "evidence.json").read_bytes() == before


def test_without_evidence_and_with_another_model(pair, mapper, capsys):
    manifest = read_manifest(mapper)
    register(mapper, manifest)
    assert kvhub("diagnose", mapper, pair, *QUICK, "--no-maps") == 0
    assert "there is none" in capsys.readouterr().err
    assert find(manifest.digest).score("k_error_concentration") is None
    wrong = ["--text", pair.text, "--source", pair.target, "--target", pair.target]
    assert run(["diagnose", str(mapper), *wrong, *QUICK]) == 7
    assert "Traceback" not in capsys.readouterr().err
