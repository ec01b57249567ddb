"""An empty home."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvhub.settings import Settings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Where kvhub keeps things in this test; empty."""
    monkeypatch.setenv("KVHUB_HOME", str(tmp_path / "home"))
    for name in ("KVHUB_DATABASE_URL", "KVHUB_TRUST", "KVHUB_REQUIRE_SIGNATURE"):
        monkeypatch.delenv(name, raising=False)
    return Settings.load()
