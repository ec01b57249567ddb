"""The command line as a user has it: a process of its own, an empty home, a loopback Hub."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub.constants
import pytest
from loopback_hub import LoopbackHub

import kvhub.cli
from kvhub.settings import Settings

BASE = {name: os.environ[name] for name in ("PATH", "LANG", "LD_LIBRARY_PATH") if name in os.environ}


@dataclass(frozen=True)
class Done:
    """What a command printed."""

    stdout: str
    stderr: str


@dataclass
class Shell:
    """Runs `kvhub` with an environment of its own."""

    environment: dict[str, str]

    @property
    def settings(self) -> Settings:
        home = Path(self.environment["KVHUB_HOME"])
        return Settings(home, f"sqlite:///{home / 'registry.db'}", False)

    def start(self, *arguments: object, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "kvhub", *map(str, arguments)],
            env=self.environment | more,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: object, code: int = 0, **more: str) -> Done:
        """In this process: quick. Output is not a terminal, and nobody is there to ask."""
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (self.environment | more).items():
                patch.setenv(name, value)
            patch.setattr(sys, "stdin", io.StringIO())
            patch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
            offline = (self.environment | more).get("HF_HUB_OFFLINE") == "1"
            patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
            with redirect_stdout(out), redirect_stderr(err):
                found = kvhub.cli.run([str(argument) for argument in arguments])
        assert found == code, (found, out.getvalue(), err.getvalue())
        return Done(out.getvalue(), err.getvalue())

    def process(self, *arguments: object, code: int = 0, **more: str) -> Done:
        """In a process of its own: imports, environment and exit as a user has them."""
        process = self.start(*arguments, **more)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, (process.returncode, out, err)
        assert "Traceback" not in err
        return Done(out, err)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(
        BASE
        | {
            "KVHUB_HOME": str(tmp_path / "home"),
            "HOME": str(tmp_path),
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
    )


@pytest.fixture
def hub(shell: Shell, tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub(tmp_path / "hub").serve() as served:
        del shell.environment["HF_HUB_OFFLINE"]
        shell.environment |= served.environment
        yield served
