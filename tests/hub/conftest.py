"""A loopback Hub, and an empty home to pull into."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from support.published import publishable

from kvhub.artifact.manifest import Manifest
from kvhub.hub.push import push
from kvhub.settings import Settings


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A Hub of this test's own; the real client in this process talks to it."""
    import huggingface_hub.constants

    with LoopbackHub(tmp_path / "hub").serve() as served:
        xet = os.environ.get("KVHUB_TEST_XET") == "1"  # tools/clients.py
        chosen = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "0" if xet else "1"}
        for name, value in (served.environment | chosen).items():
            monkeypatch.setenv(name, value)
        # Read once, at import, which another test may have done already.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", not xet)
        yield served


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Where kvhub keeps things in this test; empty."""
    monkeypatch.setenv("KVHUB_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVHUB_DATABASE_URL", raising=False)
    return Settings.load()


@pytest.fixture
def published(hub: LoopbackHub, home: Settings, tmp_path: Path) -> Manifest:
    """A mapper that passes the gate, at tester/mapper on the Hub; nothing is in the home yet."""
    manifest = publishable(tmp_path / "made")
    push(tmp_path / "made", "tester/mapper")
    hub.log.clear()
    return manifest
