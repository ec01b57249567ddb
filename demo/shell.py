"""Run the commands of the demo as a user would type them, and show them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Shell:
    """A terminal at the repository's root, with environment variables of its own."""

    def __init__(self) -> None:
        scripts = Path(sys.executable).parent
        self.environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}"}
        self.started = time.monotonic()

    def heading(self, text: str) -> None:
        """A step of the demo, with the time since its start."""
        print(f"\n== {text}  [{time.monotonic() - self.started:.0f} s]", flush=True)

    def say(self, text: str) -> None:
        """A remark."""
        print(f"# {text}", flush=True)

    def export(self, variables: Mapping[str, str], *, shown: bool = True) -> None:
        """Set variables for the commands that follow."""
        self.environment.update(variables)
        if shown:
            for name, value in variables.items():
                print(f"$ export {name}={shlex.quote(value)}", flush=True)

    def run(self, *command: str) -> None:
        """Show and run a command; its output goes to the terminal. Ends the demo where it fails."""
        self._show(command)
        done = subprocess.run(command, cwd=ROOT, env=self.environment, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(f"the demo stops: exit code {done.returncode} from {shlex.join(command)}")

    def ask(self, *command: str) -> str:
        """Run a command for its output, without showing it."""
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"the demo stops: exit code {done.returncode} from {shlex.join(command)}")
        return done.stdout

    def _show(self, command: tuple[str, ...]) -> None:
        print(f"$ {shlex.join(command)}", flush=True)
