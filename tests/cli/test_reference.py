"""docs/cli.md is what the commands say, and shells can complete them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvhub.cli.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "python -m kvhub.cli.reference > docs/cli.md"


@pytest.mark.parametrize("kind", ["bash", "zsh", "fish"])
def test_scripts(shell, kind: str) -> None:  # type: ignore[no-untyped-def]
    script = shell.run("completion", kind).stdout
    assert "_KVHUB_COMPLETE" in script
    if kind == "bash":
        subprocess.run(["bash", "-n", "-c", script], check=True)


def test_completing_commands_and_mappers(shell) -> None:  # type: ignore[no-untyped-def]
    from support.stored import stored

    from kvhub.store.lifecycle import name

    digest = stored(shell.settings).digest
    name("prod", digest, why="", settings=shell.settings)

    def complete(words: str) -> list[str]:
        count = str(len(words.split(" ")) - 1)
        environment = shell.environment | {
            "_KVHUB_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": count,
            "PATH": os.environ["PATH"],
        }
        command = [sys.executable, "-c", "from kvhub.cli import main; main()"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert complete("kvhub pro") == ["promote"]
    assert complete("kvhub info @p") == ["@prod"]
    assert complete(f"kvhub info {digest[:4]}") == [digest[:12]]
