"""Progress of fits that were never finished: what gc lists, what it deletes, what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvhub.cli import run
from kvhub.settings import Settings
from kvhub.store.collect import collect

DAY = 86400.0


def progress(home: Settings, number: int, *, days: float, captures: float | None = None) -> Path:
    """A checkpoint as a killed fit leaves it; captures: the age of the newest of them, in days."""
    path = home.cache / "fits" / f"{number:032x}"
    (path / "captures" / "model").mkdir(parents=True)
    (path / "state.json").write_text("{}")
    (path / "lock").touch()
    (path / "moments-000000010.safetensors").write_bytes(bytes(1000))
    capture = path / "captures" / "model" / "a.safetensors"
    capture.write_bytes(bytes(500))
    for item in (*path.rglob("*"), path):
        age = captures if captures is not None and item == capture else days
        os.utime(item, (time.time() - age * DAY,) * 2)
    return path


def test_by_age_and_on_request(home: Settings) -> None:
    old, young, going = (
        progress(home, 1, days=31),
        progress(home, 2, days=29),
        progress(home, 3, days=40, captures=1),
    )
    would = collect(home, dry_run=True)
    assert [(item.kind, item.path) for item in would.garbage] == [("fit", old)]
    assert would.garbage[0].size == 1502 and would.size == 1502
    assert "31 days old" in would.garbage[0].why
    assert old.exists()
    assert [item.path for item in collect(home).garbage] == [old]
    assert not old.exists() and young.exists() and going.exists()
    assert [item.path for item in collect(home, fits=20).garbage] == [young]
    assert [item.path for item in collect(home, fits=0).garbage] == [going]
    assert list((home.cache / "fits").iterdir()) == []


def test_one_that_runs_stays_however_old(home: Settings) -> None:
    path = progress(home, 1, days=100)
    code = (
        "import sys, filelock\nlock = filelock.FileLock(sys.argv[1])\nlock.acquire()\n"
        "print(1, flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert collect(home, dry_run=True, fits=0).garbage == []
        assert collect(home, fits=0).garbage == []
        assert (path / "moments-000000010.safetensors").exists()
        process.kill()
        process.wait()
    os.utime(path, (1, 1))
    assert [item.path for item in collect(home).garbage] == [path]


def test_what_is_not_a_fit_s_stays(home: Settings) -> None:
    foreign = progress(home, 1, days=100)
    (foreign / "notes.txt").write_text("mine")
    os.utime(foreign, (1, 1))
    named = home.cache / "fits" / "mine"
    named.mkdir()
    (home.cache / "fits" / "link").symlink_to(foreign)
    assert collect(home, fits=0).garbage == []
    assert foreign.exists() and named.exists()


def test_a_gc_that_was_killed_is_finished(home: Settings) -> None:
    path = progress(home, 1, days=1)
    half = path.rename(path.with_name(f".removed-{path.name}"))
    assert [(item.path, item.why) for item in collect(home).garbage] == [(half, "half deleted")]
    assert not half.exists()


def test_the_command(home: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    path = progress(home, 1, days=10)
    assert run(["gc", "--dry-run", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["garbage"] == []
    assert run(["gc", "--dry-run", "--fits", "5"]) == 0
    printed = capsys.readouterr()
    assert "a fit that has not finished, 10 days old" in printed.out
    assert printed.err == "1 would go, 1.5 kB\n" and path.exists()
    assert run(["gc", "--fits", "5"]) == 0
    assert capsys.readouterr().err == "1 deleted, 1.5 kB\n" and not path.exists()


def test_a_killed_fit_as_it_really_leaves_it(home: Settings, tmp_path: Path) -> None:
    """The names that a real checkpoint consists of are the ones that gc knows."""
    from kvhub.fit.checkpoint import Checkpoint, fit_key
    from kvhub.fit.moments import PairMoments
    from kvhub.model.identity import Geometry

    shape = Geometry(
        num_layers=1, num_attention_heads=1, num_kv_heads=1, head_dim=2, hidden_size=2, k_norm=False
    )
    described = {"what": "this"}
    directory = home.cache / "fits" / fit_key(described)
    checkpoint = Checkpoint(directory, described)
    with checkpoint.held():
        checkpoint.save(PairMoments.zeros(shape, shape, both=False, device="cpu"), 3)
        checkpoint.training(1).write_bytes(b"x")
        assert collect(home, fits=0).garbage == []
    assert [item.path for item in collect(home, fits=0).garbage] == [directory]
