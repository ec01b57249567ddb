"""A disk that is full is made free by kvhub itself, and a home that may only be read is looked at."""

from __future__ import annotations

import json
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

from benchmarks.list import fill
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import verify_artifact
from kvhub.catalog import find, open_registry
from kvhub.errors import KvhubError, NotFound
from kvhub.settings import Settings, sqlite_url
from kvhub.store import blobs
from kvhub.store.collect import collect
from kvhub.store.lifecycle import name, retire
from kvhub.store.removal import remove
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


@contextmanager
def small_home(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Settings]]:
    with small_disk(place, "40m") as disk:
        monkeypatch.setenv("KVHUB_HOME", str(disk / "home"))
        yield disk, Settings(disk / "home", sqlite_url(disk / "home" / "registry.db"), False)


def grown(settings: Settings, digest: str, size: int) -> Path:
    """Make a mapper `size` bytes larger, with a shard that is a blob, too."""
    bulk = settings.mappers / digest / "bulk"
    bulk.write_bytes(bytes(size))
    os.link(bulk, settings.home / "blobs" / f"0{digest[1:]}")
    return bulk


def run(*command: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "kvhub", *command]
    return subprocess.run(whole, capture_output=True, text=True, check=False)


def test_gc_goes_on_after_one_that_a_full_disk_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_home(tmp_path / "disk", monkeypatch) as (disk, settings):
        large = stored(settings, 1)
        grown(settings, large.digest, 6 << 20)
        small = [stored(settings, seed) for seed in (2, 3)]  # newer, so before it
        for manifest in (large, *small):
            retire(manifest.digest, why="old", settings=settings)
        with filled(disk):
            done = run("gc", "--grace", "0")
            assert done.returncode == 0 and "3 deleted, 6.3 MB" in done.stderr, done.stderr
            assert [path.name for path in settings.mappers.iterdir()] == [".lock"]
            assert list((settings.home / "blobs").iterdir()) == []


def test_gc_frees_together_what_makes_room_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_home(tmp_path / "disk", monkeypatch) as (disk, settings):
        one, two, kept = (stored(settings, seed) for seed in (1, 2, 3))
        os.link(grown(settings, one.digest, 6 << 20), settings.mappers / two.digest / "bulk")
        for manifest in (one, two, kept):
            retire(manifest.digest, why="old", settings=settings)
        name("prod", kept.digest, why="", settings=settings)
        with filled(disk):
            for manifest in (one, two):
                refused = run("rm", manifest.digest, "--yes")
                assert refused.returncode == 1 and "kvhub rm MAPPER MAPPER" in refused.stderr, refused.stderr
            would, done = collect(settings, dry_run=True), collect(settings)
            assert {item.row.digest for item in done.garbage if item.row} == {one.digest, two.digest}
            assert would.size == done.size > 6 << 20 and done.full == []
            assert [item.digest for item in done.kept] == [kept.digest]
            assert os.statvfs(disk).f_bavail * 4096 > 6 << 20
        verify_artifact(settings.mappers / kept.digest, deep=True)
        assert collect(settings, grace=0).garbage == []


def test_rm_frees_together_what_makes_room_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retiring needs room, too, so gc is no way for mappers that are ready."""
    with small_home(tmp_path / "disk", monkeypatch) as (disk, settings):
        one, two = (stored(settings, seed) for seed in (1, 2))
        os.link(grown(settings, one.digest, 6 << 20), settings.mappers / two.digest / "bulk")
        with filled(disk):
            done = run("rm", one.digest, two.digest, one.digest[:12], "--yes")
            assert done.returncode == 0 and "6.3 MB freed" in done.stderr, done.stderr
            assert done.stdout.count("removed ") == 2
        with open_registry(settings) as registry:
            assert registry.list() == []
        assert list((settings.home / "blobs").iterdir()) == []


def test_what_a_full_disk_keeps_is_named_after_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_home(tmp_path / "disk", monkeypatch) as (disk, settings):
        small = [stored(settings, seed) for seed in (1, 2)]
        for manifest in small:
            retire(manifest.digest, why="old", settings=settings)
        fit = settings.cache / "fits" / ("a" * 32)
        fit.mkdir(parents=True)
        (fit / "state.json").write_text("{}")
        os.utime(fit / "state.json", (1, 1))
        os.utime(fit, (1, 1))
        with filled(disk):
            done = run("gc", "--format", "json")
            assert done.returncode == 1 and "no room to forget 2" in done.stderr, done.stderr
            assert set(json.loads(done.stdout)["disk_full"]) == {manifest.digest for manifest in small}
            for manifest in small:
                verify_artifact(settings.mappers / manifest.digest, deep=True)
            assert not fit.exists()
        assert run("gc").returncode == 0


@pytest.mark.parametrize("size", [64 << 10, 96 << 10, 512 << 10])
def test_row_and_files_agree_in_a_large_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """How much room forgetting a row takes depends on the registry's size: it is measured."""
    with small_home(tmp_path / "disk", monkeypatch) as (disk, settings):
        settings.home.mkdir()
        fill(settings.database_url, 1000)
        manifest = stored(settings, 1)
        bulk = grown(settings, manifest.digest, size)
        with filled(disk):
            done = run("rm", manifest.digest, "--yes")
            here = (settings.mappers / manifest.digest).is_dir()
            assert (done.returncode == 1) is here, done.stderr
            if here:
                assert find(manifest.digest, settings).state is State.READY
                bulk.unlink()
                verify_artifact(settings.mappers / manifest.digest, deep=True)
            else:
                with pytest.raises(NotFound):
                    find(manifest.digest, settings)
            assert here is (size < 512 << 10) or size == 96 << 10
        assert run("rm", manifest.digest, "--yes").returncode == (0 if here else 3)


def test_files_that_went_without_their_row_are_said_to_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else takes the room that they made."""
    with small_home(tmp_path / "disk", monkeypatch) as (disk, settings):
        manifest = stored(settings, 1)
        grown(settings, manifest.digest, 1 << 20)
        real = blobs.delete

        def taken(directory: Path, given: Settings) -> None:
            real(directory, given)
            found = os.statvfs(disk)
            (disk / "other").write_bytes(bytes(found.f_bavail * found.f_frsize - (40 << 10)))

        monkeypatch.setattr(blobs, "delete", taken)
        with filled(disk):
            with pytest.raises(KvhubError, match="full"):
                remove(find(manifest.digest, settings), settings)
            assert find(manifest.digest, settings).state is State.DRAFT
            assert "are gone" in find(manifest.digest, settings).state_reason
        assert run("rm", manifest.digest, "--yes").returncode == 0


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
