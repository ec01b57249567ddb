"""No test touches the user's kvhub, and none takes more than one core for its matrices."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # before SGLang is, by whichever test
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # a shell ignores it for what it runs in the background, and children inherit that: Ctrl-C is tested
    signal.signal(signal.SIGINT, signal.default_int_handler)

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def kvhub_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty KVHUB_HOME (not created yet) for each test, and no database but its own."""
    home = tmp_path_factory.mktemp("home") / "kvhub"
    monkeypatch.setenv("KVHUB_HOME", str(home))
    monkeypatch.delenv("KVHUB_DATABASE_URL", raising=False)
    return home
