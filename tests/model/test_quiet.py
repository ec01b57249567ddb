"""What libraries warn of does not stand before kvhub's own lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tiny import make_tiny

WARNS = (
    "import warnings\nimport kvhub.cli as cli\n"
    "cli.run = lambda argv: warnings.warn('of a library', RuntimeWarning) or 0\ncli.main([])"
)


def process(*arguments: str, **environment: str) -> str:
    """stderr of a Python process."""
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONWARNINGS", "KVHUB_DEBUG", "TRANSFORMERS_VERBOSITY")
    }
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=clean | environment, timeout=120
    ).stderr


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def many_tokens(path: Path) -> None:
    """As Qwen2.5 may be published: without a version transformers takes it for an old Mistral's."""
    edit(path / "config.json", transformers_version=None)
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    more = {f"<{number}>": len(model["vocab"]) + number for number in range(100_001)}
    edit(path / "tokenizer.json", model=model | {"vocab": model["vocab"] | more})


def unknown_rope(path: Path) -> None:
    edit(path / "config.json", rope_parameters={"rope_type": "foo", "rope_theta": 1e4})


def a_remark(path: Path) -> None:
    parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "finetuned": True}
    edit(path / "config.json", rope_parameters=parameters)


@pytest.mark.parametrize(
    ("change", "warns"),
    [
        (many_tokens, "incorrect regex pattern"),
        (unknown_rope, "Missing validation function"),
        (a_remark, "Unrecognized keys"),
    ],
)
def test_advice_of_transformers(
    tmp_path: Path, kvhub_home: Path, change: Callable[[Path], None], warns: str
) -> None:
    path = make_tiny(tmp_path / "m")
    change(path)
    command = ("-m", "kvhub.cli", "check", str(path), str(path))
    assert process(*command) == ""
    assert warns in process(*command, TRANSFORMERS_VERBOSITY="warning")


def test_python_s_own_warnings() -> None:
    assert process("-c", WARNS) == ""
    assert "RuntimeWarning: of a library" in process("-c", WARNS, KVHUB_DEBUG="1")
    assert "RuntimeWarning: of a library" in process("-W", "default", "-c", WARNS)
