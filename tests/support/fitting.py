"""A tiny pair, its text, and `kvhub fit` on it in a process of its own that can be killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

from support.prose import write_text
from support.tiny import make_tiny

SMALL = ["--length", "64", "--sequences", "24", "--stride", "2", "--k", "2", "--recipe", "ridge"]


class Pair(NamedTuple):
    """Two models and a text in one directory."""

    source: str
    target: str
    text: str

    @classmethod
    def make(cls, root: Path, *, documents: int = 200) -> Pair:
        """Random models of 3 and 4 layers with unequal heads sizes."""
        return cls(
            str(make_tiny(root / "one")),
            str(make_tiny(root / "two", layers=4, head_dim=24, seed=1)),
            str(write_text(root / "text.txt", documents)),
        )

    def arguments(self, *more: str) -> list[str]:
        """Of `kvhub fit`."""
        return ["fit", self.source, self.target, "--text", self.text, *SMALL, *more]


def fork(arguments: list[str], home: Path, log: Path, **environment: str) -> int:
    """`kvhub ...` in a child of this process, which has torch loaded already; its pid.

    stdout and stderr go to `log`. Wait with `os.waitpid`.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:  # the child: whatever happens it must not return into the test
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
            os.environ.update({"KVHUB_HOME": str(home), "TOKENIZERS_PARALLELISM": "false", **environment})
            from kvhub.cli import run

            code = run(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(code)
