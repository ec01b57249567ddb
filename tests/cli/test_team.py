"""One registry of several machines, each with a home of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from support.stored import stored

from kvhub.catalog import open_registry
from kvhub.settings import Settings
from kvhub_registry import HubLocation


def test_mappers_on_other_machines(shell, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    shared = f"sqlite:///{tmp_path / 'team.db'}"
    ours, theirs = (Settings(home, shared, False) for home in (shell.settings.home, tmp_path / "b"))
    here, there, local = stored(ours, 1), stored(theirs, 2), stored(ours, 3)
    with open_registry(ours) as registry:
        for manifest in (here, there):
            place = HubLocation(repo_id="org/m", commit=manifest.digest[:40], pushed=True)
            registry.add_location(manifest.digest, place)
    shutil.move(theirs.home, tmp_path / "far")  # another machine's disk
    team, lock = {"KVHUB_DATABASE_URL": shared}, tmp_path / "kvhub.lock"

    def mappers(code: int = 0) -> dict[str, str]:
        found = shell.run("doctor", "--no-hub", "--format", "json", code=code, **team).stdout
        return next(item for item in json.loads(found) if item["check"] == "mappers")

    said = mappers()
    assert (said["result"], said["found"][:8]) == ("ok", "2 ready,")
    assert said["found"].endswith("the files of 1 more are on other machines")
    done = shell.run("lock", "-o", lock, **team)
    assert [entry["digest"] for entry in json.loads(lock.read_text())["mappers"]] == [here.digest]
    assert f"left out, on no Hub: {local.digest[:12]}" in done.stderr
    assert f"left out, files not on this machine: {there.digest[:12]}" in done.stderr
    assert "kvhub pull org/m@" in shell.run("lock", there.digest, "-o", lock, code=3, **team).stderr
    (ours.mappers / here.digest / "model.safetensors").unlink()
    assert here.digest[:12] in mappers(code=1)["found"]
