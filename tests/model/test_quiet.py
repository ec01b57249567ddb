"""What libraries warn of does not stand before kvhub's own lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        # As many models are published; transformers then takes every tokenizer for an old one of Mistral's.
        ({"transformers_version": None}, "incorrect regex pattern"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1e4}}, "Missing validation function"),
    ],
)
def test_advice_of_transformers(tmp_path: Path, kvhub_home: Path, changes: dict, warns: str) -> None:  # type: ignore[type-arg]
    path = make_tiny(tmp_path / "m")
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    command = ("-m", "kvhub.cli", "check", str(path), str(path))
    assert process(*command) == ""
    assert warns in process(*command, TRANSFORMERS_VERBOSITY="warning")


def test_python_s_own_warnings() -> None:
    assert process("-c", WARNS) == ""
    assert "RuntimeWarning: of a library" in process("-c", WARNS, KVHUB_DEBUG="1")
    assert "RuntimeWarning: of a library" in process("-W", "default", "-c", WARNS)
