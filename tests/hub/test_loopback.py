"""The loopback Hub on its own, as the demo may start it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from loopback_hub import TOKEN, USER

ROOT = Path(__file__).parents[2]


def test_it_runs_as_a_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "demo.loopback_hub", "--root", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        request = urllib.request.Request(url + "/api/whoami-v2", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert json.load(answer)["name"] == USER
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
