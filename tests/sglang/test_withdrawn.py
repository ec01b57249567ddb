"""A mapper is withdrawn while it serves: nothing of it is met again, and no slot is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from support.pools import LARGE, SMALL, Engine, mapper_between, native_rows

from kvhub_sglang.settings import ServedMapper
from kvhub_sglang.watch import Watch

MAPPER = mapper_between(SMALL, LARGE)
PROMPT = [(i * 37 + 11) % 997 for i in range(200)]
ASK = {"reuse": True}


@pytest.fixture
def target(tmp_path: Path) -> Engine:
    """May map what a source has published of PROMPT."""
    Engine(SMALL, tmp_path / "exchange").run(PROMPT, 4)
    return Engine(LARGE, tmp_path / "exchange", (MAPPER,))


@pytest.mark.parametrize("when", ["before", "staged", "promised", "running"])
def test_a_mapper_is_withdrawn(target: Engine, when: str) -> None:
    digest = MAPPER.manifest.digest
    if when == "before":
        target.serving.withdraw(digest, "retired")
        assert target.run(PROMPT, ask=ASK).meta["mapped"] == 0
        target.empty()
        return
    req = target.request(PROMPT, ask=ASK)
    if when == "staged":
        target.cache.arrived(req)
    elif when == "promised":
        assert target.match(req) == 192
    if when != "running":
        target.serving.withdraw(digest, "retired")
    running = target.admit(req)
    if when == "running":
        assert running.meta["mapped"] == 192
        target.serving.withdraw(digest, "retired")
    else:
        assert (
            running.meta["mapped"] == 0 and running.meta["reason"] == "withdrawn" and req.cache_salt is None
        )
        torch.testing.assert_close(target.row(running, 200), native_rows(LARGE, PROMPT, range(200)))
    target.decode(running, 70)
    target.finish(running)
    after = target.run([*PROMPT, *range(80)], ask=ASK)  # its rows are never met again
    assert after.meta["mapped"] == 0
    target.empty()


@pytest.mark.parametrize("how", ["settings", "removed from settings", "artifact"])
def test_the_watch_notices(target: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    digest = MAPPER.manifest.digest
    artifact = tmp_path / "mapper"
    artifact.mkdir()
    (artifact / "manifest.json").write_text("{}")
    served = {"path": str(artifact), "digest": digest, "state": "ready"}
    file = tmp_path / "serving.json"
    content = {"exchange": str(tmp_path / "exchange"), "mappers": [served], "worth": "always"}
    file.write_text(json.dumps(content))
    monkeypatch.setenv("KVHUB_SERVING", str(file))
    settings = target.serving.settings
    target.serving.settings = settings.model_copy(update={"mappers": [ServedMapper(**served)]})
    watch = target.cache.watch = Watch(target.serving)
    watch.look()
    assert target.run(PROMPT, ask=ASK).meta["mapped"] == 192
    if how == "artifact":
        (artifact / "manifest.json").unlink()
    else:
        served["state"] = "retired"
        content["mappers"] = [served] if how == "settings" else []
        replacement = tmp_path / "new.json"
        replacement.write_text(json.dumps(content))
        os.replace(replacement, file)  # noqa: PTH105
    watch.look()
    watch.look()
    assert len(watch.found) == 1
    assert target.run([*PROMPT, 4], ask=ASK).meta["mapped"] == 0
    assert not target.serving.candidates
    target.empty()
