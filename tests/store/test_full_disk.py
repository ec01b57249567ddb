"""A disk that is full is made free by kvhub itself, and a home that may only be read is looked at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from loopback_hub import LoopbackHub
from support.published import publishable
from support.small_disk import filled, small_disk
from support.stored import stored

from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import verify_artifact
from kvhub.catalog import find, open_registry
from kvhub.errors import NotFound
from kvhub.settings import Settings, sqlite_url
from kvhub.store.collect import collect
from kvhub.store.lifecycle import retire
from kvhub_registry import State


@contextmanager
def full_home(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Settings, Manifest, Manifest]]:
    """A home on a disk without a free byte: a mapper that is ready and one that is retired."""
    with small_disk(place, "4m") as disk:
        monkeypatch.setenv("KVHUB_HOME", str(disk / "home"))
        settings = Settings(disk / "home", sqlite_url(disk / "home" / "registry.db"), False)
        ready, old = stored(settings, 1), stored(settings, 2)
        for n, manifest in enumerate((ready, old)):  # a shard whose bytes its blob keeps, too
            bulk = settings.mappers / manifest.digest / "bulk"
            bulk.write_bytes(bytes(1 << 19))
            os.link(bulk, settings.home / "blobs" / f"{n}{'0' * 63}")
        retire(old.digest, why="old", settings=settings)
        with filled(disk):
            yield settings, ready, old


def test_gc_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_home(tmp_path / "disk", monkeypatch) as (settings, ready, old):
        would, done = collect(settings, dry_run=True), collect(settings)
        assert [item.row.digest for item in done.garbage if item.row] == [old.digest]
        assert would.size == done.size >= old.size
        assert {path.name for path in settings.mappers.iterdir()} - {".lock"} == {ready.digest}
        assert len(list((settings.home / "blobs").iterdir())) == 2
        with open_registry(settings) as registry:
            assert [row.digest for row in registry.list()] == [ready.digest] and not registry.health()
        assert collect(settings, grace=0).garbage == []


@pytest.mark.parametrize("command", ["rm", "gc"])
def test_files_that_make_too_little_room_stay_with_their_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        monkeypatch.setenv("KVHUB_HOME", str(disk / "home"))
        settings = Settings(disk / "home", sqlite_url(disk / "home" / "registry.db"), False)
        small = stored(settings, 1)
        if command == "gc":
            retire(small.digest, why="old", settings=settings)
        with filled(disk):
            given = [small.digest, "--yes"] if command == "rm" else ["--grace", "0"]
            call = [sys.executable, "-m", "kvhub", command, *given]
            done = subprocess.run(call, capture_output=True, text=True, check=False)
            assert done.returncode == 1 and "is full" in done.stderr and "Traceback" not in done.stderr
            assert verify_artifact(settings.mappers / small.digest, deep=True).digest == small.digest
        assert subprocess.run(call, capture_output=True, check=False).returncode == 0
        with open_registry(settings) as registry:
            assert registry.list() == []


def test_rm_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_home(tmp_path / "disk", monkeypatch) as (settings, ready, _):
        command = [sys.executable, "-m", "kvhub", "rm", ready.digest, "--yes"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, "freed" in done.stderr) == (0, True), done.stderr
        with pytest.raises(NotFound):
            find(ready.digest, settings)


KILLED = """
import os, shutil, signal, sys
from kvhub.store import blobs
from kvhub.store.collect import collect
def delete(directory, settings):
    if sys.argv[1] == "after":
        real(directory, settings)
    elif sys.argv[1] == "between":
        shutil.rmtree(directory)
    os.kill(os.getpid(), signal.SIGKILL)
real, blobs.delete = blobs.delete, delete
collect()
"""


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_killed_while_it_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    with full_home(tmp_path / "disk", monkeypatch) as (settings, ready, old):
        done = subprocess.run([sys.executable, "-c", KILLED, when], check=False)
        assert done.returncode == -signal.SIGKILL
        assert find(ready.digest, settings).state is State.READY
        collect(settings)
        with pytest.raises(NotFound):
            find(old.digest, settings)
        assert {path.name for path in settings.mappers.iterdir()} - {".lock"} == {ready.digest}
        assert collect(settings, grace=0).garbage == []


def test_a_read_only_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        monkeypatch.setenv("KVHUB_HOME", str(disk / "home"))
        settings = Settings.load()
        digest = stored(settings, 1).digest
        with open_registry(settings) as registry:
            registry.add_location(digest, place())
        retire(stored(settings, 2).digest, why="old")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        try:

            def run(*command: str) -> subprocess.CompletedProcess[str]:
                whole = [sys.executable, "-m", "kvhub", *command]
                return subprocess.run(whole, capture_output=True, text=True, check=False, cwd=tmp_path)

            would = run("gc", "--dry-run")
            assert (would.returncode, would.stderr.startswith("1 would go")) == (0, True), would.stderr
            found = run("doctor", "--no-hub").stdout
            assert "Errno" not in found and "things that nothing keeps" in found
            done = run("lock", digest)
            assert (done.returncode, (tmp_path / "kvhub.lock").exists()) == (4, False), done.stderr
            with LoopbackHub(tmp_path / "hub").serve() as hub:
                for name, value in {**hub.environment, "HF_HOME": str(tmp_path / "hf")}.items():
                    monkeypatch.setenv(name, value)
                monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
                publishable(tmp_path / "made", seed=7)
                with monkeypatch.context() as elsewhere:
                    elsewhere.setenv("KVHUB_HOME", str(tmp_path / "other"))
                    pushed = run("push", str(tmp_path / "made"), "tester/mapper")
                    assert pushed.returncode == 0, pushed.stderr
                done = run("pull", "tester/mapper")
                assert done.returncode == 4 and "cannot store" in done.stderr, done.stderr
        finally:
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


def place():  # type: ignore[no-untyped-def]
    from kvhub_registry import HubLocation

    return HubLocation(repo_id="o/m", commit="a" * 40, pushed=True)
