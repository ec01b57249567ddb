"""Every study on a tiny pair, twice from the same files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.prose import write_text
from support.tiny import make_tiny

from kvhub.cli import run
from kvhub.fit.ridge import Regularization
from kvhub.fit.run import fit_pair
from kvhub.fit.settings import FitSettings
from kvhub.model.load import load_model
from kvhub.study.pair import StudyPair, StudyText
from kvhub.study.studies import STUDIES, TURNS

SETTINGS = FitSettings(
    k=2, sequences=12, length=64, stride=2, store_dtype="float32", created="2026-01-01T00:00:00+00:00"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("studies")
    make_tiny(root / "one", layers=3)
    make_tiny(root / "two", layers=2, head_dim=24, seed=1)
    for number, name in enumerate(("a", "b")):
        write_text(root / f"{name}.txt", 150, seed=number)
    return root


@pytest.fixture(scope="module")
def pair(root: Path) -> StudyPair:
    one, two = (load_model(root / name, torch.float32) for name in ("one", "two"))
    text = StudyText.cut(
        [root / "a.txt", root / "b.txt"], one.tokenizer, SETTINGS, windows=4, prefix=40, tail=12, tuning=2
    )
    return StudyPair(one, two, text, SETTINGS, root / "captures")


def test_sides_of_the_text_are_apart(pair: StudyPair) -> None:
    text = pair.text
    assert [len(w) for w in text.fit.values()] == [6, 6] and [len(w) for w in text.held_out.values()] == [
        2,
        2,
    ]
    used = {tuple(w.tolist()[:40]) for part in (text.fit, text.tuning) for ws in part.values() for w in ws}
    held = {tuple(w.tolist()[:40]) for ws in text.held_out.values() for w in ws}
    assert len(used) == 14 and not used & held


def test_a_studys_solve_is_the_fits(pair: StudyPair) -> None:
    from kvhub.fit.calibration import CalibrationSet

    held = next(iter(pair.text.held_out.values()))
    windows = CalibrationSet(torch.stack(pair.windows()), held, "test")
    (fitted,) = fit_pair(pair.source, pair.target, windows, SETTINGS)
    solved = pair.solve(pair.moments(), 2, Regularization())
    assert solved.layers == fitted.manifest.source_layers
    for name, tensor in fitted.tensors.items():
        torch.testing.assert_close(solved.tensors[name], tensor)


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_gives_the_same_rows_twice(pair: StudyPair, study: str) -> None:
    rows = list(STUDIES[study](pair))
    variants = [row.variant for row in rows if row.domain == "all"]
    expected = {"k": 3, "lambda": 7, "rope": 3, "sequences": 4, "domain": 3, "direction": 2}
    assert len(set(variants)) == len(variants) == expected.get(study, TURNS)
    assert all(row.low <= row.excess_nll <= row.high for row in rows)
    if study in ("rope", "domain"):
        again = StudyPair(pair.source, pair.target, pair.text, SETTINGS, pair.directory)
        assert list(STUDIES[study](again)) == rows
    if study == "rope":
        content, unturned, _ = rows
        assert unturned.cosine < content.cosine


def test_the_command_writes_csv(root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["study", "direction", str(root / "one"), str(root / "two"), "--text", str(root / "a.txt")]
    arguments += ["--captures", str(root / "captures"), "--k", "1", "--sequences", "6", "--length", "64"]
    arguments += ["--windows", "2", "--prefix", "40", "--tail", "12", "--dtype", "float32"]
    assert run([*arguments, "--output", str(tmp_path / "out.csv")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("pair,study,variant,domain,excess_nll") and len(lines) == 3
    assert (tmp_path / "out.csv").read_text().splitlines() == lines
    assert run([*arguments[:-2], "--dtype", "float32", "--k", "auto"]) == 2
    # text that is only judged on has a line of its own, and no part in `all`
    alone = [line.split(",") for line in lines[1:]]
    assert run([*arguments, "--other", str(root / "b.txt")]) == 0
    with_other = [line.split(",") for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[3] for line in with_other] == ["all", "other"] * 2
    assert [line for line in with_other if line[3] == "all"] == alone
    write_text(tmp_path / "other.txt", 150, seed=5)
    assert run([*arguments, "--other", str(tmp_path / "other.txt")]) == 2
    assert "a text cannot be called other" in capsys.readouterr().err
    at = arguments.index("--k")
    without = [*arguments[:at], *arguments[at + 2 :]]
    assert run(without) == 0  # all layers, of which these models have fewer than eight
    assert run(["study", "k", *arguments[2:], "--stride", "64"]) == 2  # a row a window
    assert "no variant could be fitted" in capsys.readouterr().err
    assert run([*arguments, "--output", str(tmp_path / "new" / "out.csv")]) == 0
    assert (tmp_path / "new" / "out.csv").read_text().splitlines() == lines
