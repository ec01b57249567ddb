"""The group: light, lazy, stable exit codes, never a traceback."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

import kvhub.cli as command_line
from kvhub import errors
from kvhub.cli import COMMANDS, run

HEAVY = (
    "torch",
    "transformers",
    "matplotlib",
    "sglang",
    "numpy",
    "safetensors",
    "alembic",
    "huggingface_hub",
)


def test_list_and_help_load_nothing_heavy(shell) -> None:  # type: ignore[no-untyped-def]
    shell.run("list")  # makes the database
    for arguments in (["list", "--format", "json"], ["--help"]):
        code = (
            "import sys\nfrom kvhub.cli import run\n"
            f"code = run({arguments!r})\n"
            f"heavy = sorted(set({HEAVY!r}) & set(sys.modules))\n"
            "print(heavy, code, file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], env=shell.environment, capture_output=True, text=True, check=True
        )
        assert done.stderr.splitlines()[-1] == "[] 0"


@pytest.mark.parametrize(
    "command", ["info {}", "pull {}", "pull o/m@{}", "push {} o/m", "{}", "list --{}", "diff {} x"]
)
def test_no_argument_is_echoed_whole(shell, capsys: pytest.CaptureFixture[str], command: str) -> None:  # type: ignore[no-untyped-def]
    arguments = command.replace("{}", "a/" + "b" * 100_000).split(" ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVHUB_HOME", shell.environment["KVHUB_HOME"])
        assert run(arguments) != 0
    assert 0 < len(capsys.readouterr().err) < 3000


def test_every_command_is_there_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert run([name, "--help"]) == 0
        assert f"kvhub {name}" in capsys.readouterr().out
    assert run(["--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown and help_ in shown for name, help_ in COMMANDS.items())


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lst"]) == 2
    assert "Did you mean 'list'" in capsys.readouterr().err
    assert run(["list", "--sorce", "x"]) == 2
    assert run(["list", "--state", "nonsense"]) == 2
    assert run(["info"]) == 2
    assert run(["--version"]) == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.KvhubError("m", "h"), 1),
        (errors.BadInput("m", "h"), 2),
        (errors.NotFound("m", "h"), 3),
        (errors.AccessDenied("m", "h"), 4),
        (errors.Unreachable("m", "h"), 5),
        (errors.Corrupt("m", "h"), 6),
        (errors.Incompatible("m", "h"), 7),
    ],
)
def test_exit_codes(
    error: errors.KvhubError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, error)
    assert run(["list"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "Error: m\nHint: h\n"


def test_registry_errors_have_their_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvhub_registry import Damaged, NotRegistered

    for error, code in ((NotRegistered("m", "h"), 3), (Damaged("m"), 6)):
        raising(monkeypatch, error)
        assert run(["list"]) == code
        assert capsys.readouterr().err.startswith("Error: m\n")


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (errno.ENOSPC, 1, "Error: the disk is full"),
        (errno.EROFS, 4, "Error: x.db is on a disk that is read-only"),
        (errno.EACCES, 4, "Error: x.db may not be written"),
    ],
)
def test_a_disk_that_a_library_could_not_write(
    number: int, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, OSError(number, os.strerror(number), "x.db"))
    assert run(["list"]) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == says and len(lines) == 2 and "bug" not in lines[1]


def test_an_unknown_exception_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, RuntimeError("first\nsecond \x1b[31m"))
    assert run(["list"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("Error: RuntimeError: first")
    assert "\x1b" not in lines[0]
    assert "KVHUB_DEBUG=1" in lines[1]
    monkeypatch.setenv("KVHUB_DEBUG", "1")
    run(["list"])
    assert "Traceback" in capsys.readouterr().err


def test_interrupts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for error in (KeyboardInterrupt(), click.Abort()):
        raising(monkeypatch, error)
        assert run(["list"]) == 130
        assert "Traceback" not in capsys.readouterr().err


def test_ctrl_c_at_any_moment_is_130_without_a_traceback(shell) -> None:  # type: ignore[no-untyped-def]
    ended = []
    for delay in (0.1, 0.4, 0.7):
        process = shell.start("list")
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        ended.append(process.returncode)
        if delay >= 0.4:  # before that, Python itself may still be starting
            assert "Traceback" not in err
    assert set(ended) <= {0, 130, -signal.SIGINT, 1}


def test_a_closed_pipe_is_no_error_message(shell) -> None:  # type: ignore[no-untyped-def]
    command = f"{sys.executable} -m kvhub --help | true"
    done = subprocess.run(
        ["bash", "-c", command], env=shell.environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Make `kvhub list` fail in this way."""

    @click.command()
    def command() -> None:
        raise error

    monkeypatch.setattr(command_line.LazyGroup, "get_command", lambda *_: command)


def test_no_home_is_made_by_asking_for_help(shell) -> None:  # type: ignore[no-untyped-def]
    shell.run("--help")
    assert not Path(shell.environment["KVHUB_HOME"]).exists()
