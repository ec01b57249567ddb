"""`kvhub explain`: the decision of a server, without the server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvhub.cli import run
from kvhub.serving.cost import CostModel

M = "a" * 64


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVHUB_HOME", str(tmp_path))
    model = CostModel()
    for tokens in (64, 128, 256, 512, 1024):
        model.observe_prefill(tokens, 0, 5 + 1.0 * tokens)
        model.observe_map(M, tokens, 100 + 0.1 * tokens)
    model.save(tmp_path / "cost.json")
    return tmp_path


def write(home: Path, **changes: Any) -> None:
    content = {
        "mappers": [{"path": "x", "digest": M, "state": "ready"}],
        "min_span": 64,
        "reuse": "asked",
        "worth": "auto",
        "cost_file": str(home / "cost.json"),
    }
    (home / "serving").mkdir(exist_ok=True)
    (home / "serving" / "30000.json").write_text(json.dumps({**content, **changes}))


def explained(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert run(["explain", "30000", "--format", "json", *options]) == 0
    [row] = json.loads(capsys.readouterr().out)["mappers"]
    return dict(row)


@pytest.mark.parametrize(
    ("tokens", "decision", "mapped"), [(1024, "map", 960), (100, "compute", 0), (65, "compute", 0)]
)
def test_long_histories_are_mapped(
    home: Path, capsys: pytest.CaptureFixture[str], tokens: int, decision: str, mapped: int
) -> None:
    write(home)
    row = explained(capsys, "--tokens", str(tokens))
    assert (row["decision"], row["mapped"]) == (decision, mapped)
    assert row["exact"] + row["mapped"] + row["computed"] == tokens
    assert (row["reuse_ms"] < row["compute_ms"]) == (decision == "map")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"worth": "always"}, "worth is always"),
        ({"reuse": "off"}, "declined"),
        ({"cost_file": None}, "not measured"),
    ],
)
def test_what_decides(
    home: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], reason: str
) -> None:
    write(home, **changes)
    row = explained(capsys, "--tokens", "100" if "worth" in changes else "1000")
    assert reason in row["reason"] and (row["decision"] == "map") == ("worth" in changes)


def test_prefix_and_tail_are_computed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(home, mappers=[{"path": "x", "digest": M, "state": "ready", "exact_prefix": 4, "native_tail": 32}])
    row = explained(capsys, "--tokens", "1000", "--new", "20")
    assert (row["exact"], row["mapped"]) == (4, 960 - 32 - 4)


@pytest.mark.parametrize(
    ("limits", "options", "reason"),
    [
        ({"max_turn": 3}, (), "turns: no hint"),
        ({"max_turn": 3}, ("--turn", "4"), "turns: turn 4"),
        ({"max_turn": 3}, ("--turn", "3"), ""),
        ({"min_span": 961}, (), "short: 960 tokens to gain, min_span 961"),
        ({"min_span": 960}, (), ""),
    ],
)
def test_limits_of_one_mapper(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    limits: dict[str, int],
    options: tuple[str, ...],
    reason: str,
) -> None:
    write(home, mappers=[{"path": "x", "digest": M, "state": "ready", **limits}])
    row = explained(capsys, "--tokens", "1000", *options)
    assert row["decision"] == ("compute" if reason else "map") and reason in row["reason"]


def test_every_format_says_the_same(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = "b" * 64
    write(home, mappers=[{"path": "x", "digest": d, "state": "ready"} for d in (M, other)])
    said = {}
    for form in ("table", "json", "tsv"):
        assert run(["explain", "30000", "--tokens", "1000", "--format", form]) == 0
        said[form] = capsys.readouterr().out
    rows = json.loads(said["json"])["mappers"]
    heading, *lines = [line.split("\t") for line in said["tsv"].splitlines()]
    assert len(lines) == 2 and all(len(line) == len(heading) for line in lines)
    for row, line in zip(rows, lines, strict=True):
        found = dict(zip(heading, line, strict=True))
        assert found.pop("tokens") == "1000"
        assert found == {key: "" if row[key] is None else str(row[key]) for key in found}
        assert f"mapper {row['mapper'][:12]}: {row['decision']}" in said["table"]
    assert [row["decision"] for row in rows] == ["map", "compute"]  # the second was never timed


@pytest.mark.parametrize(("server", "code"), [("1", 3), ("nowhere.json", 3)])
def test_no_such_server(home: Path, server: str, code: int) -> None:
    assert run(["explain", server, "--tokens", "10"]) == code


def test_bad_files_and_numbers(home: Path) -> None:
    write(home, mappers=7)
    assert run(["explain", "30000", "--tokens", "10"]) == 6
    write(home)
    assert run(["explain", "30000", "--tokens", "10", "--held", "20"]) == 2


SERVED = {"path": "x", "digest": M}


@pytest.mark.parametrize(
    "text",
    [
        '{"mappers": ["x"]}',
        '{"mappers": [{}]}',
        '{"mappers": [], "cost_file": 5}',
        "[" * 100_000,
        *(
            json.dumps({"mappers": [{**SERVED, **change}]})
            for change in ({"native_tail": "x"}, {"native_tail": -5000}, {"exact_prefix": -500})
        ),
    ],
    ids=range(7),
)
def test_what_is_no_settings_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert run(["explain", str(tmp_path / "x.json"), "--tokens", "10"]) == 6
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_is_no_file_and_what_may_be_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        assert run(["explain", str(place), "--tokens", "10"]) == 6
    served = {"mappers": [SERVED], "cost_file": str(tmp_path / "pipe")}
    (tmp_path / "x.json").write_text(json.dumps(served))
    assert run(["explain", str(tmp_path / "x.json"), "--tokens", "10"]) == 0
