"""Ten kills (`python benchmarks/hub_kill.py` does a hundred, with fits among them)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from support.killing import Killing


@pytest.mark.slow
def test_ten_kills(tmp_path: Path) -> None:
    draw = random.Random(1)
    with LoopbackHub(tmp_path / "hub").serve() as hub:
        killing = Killing(tmp_path, hub)
        kinds = ("pull", "push", "gc", "migrate", "create")
        running = [killing.kill(kind, draw) for kind in kinds for _ in range(2)]
        killing.close()
    assert sum(running) >= 4
