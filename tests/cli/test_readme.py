"""README's way from nothing to a pulled, verified, explained mapper, as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from loopback_hub import LoopbackHub
from support.published import publishable

from kvhub.hub.push import push
from kvhub.settings import Settings

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_three_commands_from_nothing(shell, hub: LoopbackHub, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    manifest = publishable(tmp_path / "made")
    for name, value in shell.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    other = tmp_path / "elsewhere"
    push(tmp_path / "made", "tester/mapper", settings=Settings(other, f"sqlite:///{other}/r.db", False))
    block = README.partition("pulled, verified and explained:")[2].partition("```\n")[2].partition("```")[0]
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert [command[:2] for command in commands] == [
        ["kvhub", "pull"],
        ["kvhub", "verify"],
        ["kvhub", "info"],
    ]
    assert not shell.settings.home.exists()
    said = []
    for command in commands:
        arguments = [re.sub(r"^org/name$", "tester/mapper", word) for word in command[1:]]
        assert arguments != command[1:]
        said.append(shell.run(*arguments).stdout)
    assert manifest.digest in said[0] and "ready" in said[0]
    assert "every sha256 agrees" in said[1] and "passes the gate" in said[1] and "not signed" in said[1]
    for part in ("org/Small-1B", "ridge, full, k = 1", "passed the gate", "wrong-document", "pulled from"):
        assert part in said[2], part
