"""`kvhub fit` as a user runs it: real models, files and registry; only a full disk is acted."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.prose import write_text
from support.tiny import make_tiny

from kvhub.artifact.read import verify_artifact
from kvhub.catalog import open_registry
from kvhub.cli import run

SMALL = ["--length", "64", "--sequences", "24", "--stride", "2", "--k", "2"]


class Place(NamedTuple):
    source: str
    target: str
    text: str
    home: Path

    def arguments(self, *more: str) -> list[str]:
        return ["fit", self.source, self.target, "--text", self.text, *SMALL, *more]

    def registered(self) -> list[str]:
        if not (self.home / "registry.db").exists():
            return []
        with open_registry() as registry:
            return sorted(row.digest for row in registry.list())

    def artifacts(self) -> list[Path]:
        mappers = self.home / "mappers"
        return sorted(mappers.iterdir()) if mappers.exists() else []


@pytest.fixture
def place(tmp_path: Path, kvhub_home: Path) -> Place:
    return Place(
        str(make_tiny(tmp_path / "one")),
        str(make_tiny(tmp_path / "two", layers=4, head_dim=24, seed=1)),
        str(write_text(tmp_path / "text.txt", 200)),
        kvhub_home,
    )


def test_fit_both_writes_registers_and_says_what_is_next(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(place.arguments("--both", "--lambda", "paper", "--store-dtype", "float32")) == 0
    printed = capsys.readouterr()
    assert len(place.artifacts()) == 2
    for directory in place.artifacts():
        manifest = verify_artifact(directory, deep=True)
        assert directory.name == manifest.digest and manifest.digest in printed.out
        assert (manifest.regularization, manifest.regularization_convention) == (0.01, "absolute-mean")
        assert manifest.weights_dtype == "float32"
        assert f"kvhub eval {manifest.digest[:12]} --text {place.text}" in printed.out
    assert place.registered() == [directory.name for directory in place.artifacts()]
    with open_registry() as registry:
        assert {str(row.state) for row in registry.list()} == {"draft"}
    assert "one -> two" in printed.out and "two -> one" in printed.out
    assert "running both models: 24/24" in printed.err
    assert "are few" not in printed.err
    assert run(place.arguments("--sequences", "3")) == 0
    assert "note: 96 rows for 64 features are few" in capsys.readouterr().err


def test_output_puts_a_directory_for_each_mapper(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    assert run(place.arguments("--both", "--output", str(out))) == 0
    assert sorted(path.name for path in out.iterdir()) == ["one--two--k2", "two--one--k2"]
    assert len(place.registered()) == 2 and not place.artifacts()
    # Found before the models are run a second time, and nothing is touched.
    before = (out / "one--two--k2" / "manifest.json").read_bytes()
    assert run(place.arguments("--output", str(out))) == 2
    assert (out / "one--two--k2" / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (["--k", "4"], 2, "--k 4 is outside 1..3"),
        (["--k", "0"], 2, "outside 1..3"),
        (["--lambda", "big"], 2, "--lambda big"),
        (["--lambda", "-1"], 2, "--lambda -1"),
        (["--lambda", "nan"], 2, "--lambda nan"),
        (["--length", "5000"], 2, "exceeds the context"),
        (["--stride", "0"], 2, "at least 1"),
        (["--exact-prefix", "64"], 2, "leaves no row"),
        (["--length", "4000"], 2, "held-out side of the text is shorter"),
        (["--sequences", "2"], 2, "needs at least 65 (192 tokens"),
        (["--text", "absent.txt"], 3, "no such text file"),
        pytest.param(
            ["--device", "cuda"],
            2,
            "no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_arguments_are_one_line_and_leave_nothing(
    place: Place, capsys: pytest.CaptureFixture[str], more: list[str], code: int, says: str
) -> None:
    assert run(place.arguments(*more)) == code
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("Hint: ")]
    assert len(errors) == 1 and errors[0].startswith("Error: ") and says in errors[0]
    assert not place.artifacts() and not place.registered()


def test_unusable_models_are_refused(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(make_tiny(tmp_path / "three", vocab=300))
    windowed = make_tiny(tmp_path / "four", model_type="mistral")
    config = (windowed / "config.json").read_text().replace('"sliding_window": null', '"sliding_window": 64')
    (windowed / "config.json").write_text(config)
    for source, target, code, says in (
        (place.source, other, 7, "different vocabularies"),
        (place.source, str(windowed), 7, "sliding"),
        (place.source, "/no/such/model", 3, "no such model"),
    ):
        assert run(["fit", source, target, "--text", place.text, *SMALL]) == code
        assert says in capsys.readouterr().err
    assert not place.artifacts()


def test_nan_in_a_cache_names_the_model_and_the_layer(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights that are finite (`tests/model/test_finite.py` has the others), in a forward that overflows."""
    from safetensors.torch import load_file, save_file

    file = Path(place.target) / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.2.self_attn.v_proj.weight"].fill_(3e38)
    save_file(weights, file, metadata={"format": "pt"})
    for dtype, hint in (("float32", "overflows even in float32"), ("bfloat16", "use --dtype float32")):
        assert run(place.arguments("--dtype", dtype)) == 1
        error = capsys.readouterr().err
        assert "the values that two caches in layer 2" in error
        assert "its weights are finite" in error and hint in error
    assert not place.artifacts()


def test_too_little_room_is_found_before_the_models_run(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(place.source)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    assert run(place.arguments()) == 1
    error = capsys.readouterr().err
    assert "MB free" in error and "running both models" not in error


@pytest.mark.parametrize(
    ("failure", "code", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 1, "the disk is full"),
        (KeyboardInterrupt(), 130, "Interrupted"),
    ],
)
@pytest.mark.parametrize("output", [False, True])
def test_a_full_disk_or_ctrl_c_while_writing_leaves_nothing(
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: BaseException,
    code: int,
    says: str,
    output: bool,
) -> None:
    real, calls = os.fsync, 0

    def fails(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 7:  # the first artifact is whole by then, the second is not
            raise failure
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    out = tmp_path / "out"
    assert run(place.arguments("--both", *(["--output", str(out)] if output else []))) == code
    assert calls == 8
    assert says in capsys.readouterr().err
    assert not place.artifacts() and not place.registered()
    assert not out.exists() or not list(out.iterdir())


def test_ctrl_c_leaves_nothing_half_written(place: Place) -> None:
    command = [sys.executable, "-m", "kvhub.cli", *place.arguments("--sequences", "5000", "--stride", "1")]
    write_text(Path(place.text), 4000)  # enough that the fit cannot end first
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    cache = place.home / "cache"
    deadline = time.monotonic() + 60
    while not cache.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)  # the models are identified: what follows is the fit itself
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and out == ""
    assert not place.artifacts() and not place.registered()


def test_weights_lengths_and_conversations_from_the_command_line(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_text(tmp_path / "other.txt", 200, seed=3)
    assert run(place.arguments("--text", f"{other}:0.5", "--length", "32,64", "--k", "1")) == 0
    (directory,) = place.artifacts()
    calibration = verify_artifact(directory, deep=True).calibration
    assert (calibration.sequences, calibration.length, calibration.tokens) == (24, 64, 12 * 96)
    assert "other@" in calibration.dataset and calibration.dataset.endswith(" x0.5")
    out = capsys.readouterr().out
    assert f"--text {place.text} --text {other} " in out  # as eval takes them, without weights
    for more, says in (
        (["--length", "64,x"], "--length 64,x is not a number"),
        (["--length", "0,64"], "at least 1"),
        (["--dataset", "nonsense"], "is not org/name"),
        (["--text", "absent.txt:3"], "no such text file: absent.txt"),
    ):
        assert run(place.arguments(*more)) in (2, 3)
        assert says in capsys.readouterr().err
    assert run(["fit", place.source, place.target]) == 2
    assert "no text to fit on" in capsys.readouterr().err
