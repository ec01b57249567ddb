"""gc: what goes, what stays, and eight processes at once."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.published import make_artifact, publishable
from support.stored import stored

from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import verify_artifact
from kvhub.catalog import find, open_registry
from kvhub.errors import Corrupt, NotFound
from kvhub.hub.lockfile import Lock, LockedMapper, write_lock
from kvhub.settings import Settings
from kvhub.store import collect as collecting
from kvhub.store import roots
from kvhub.store.collect import collect
from kvhub.store.health import examine
from kvhub.store.lifecycle import name, promote, retire
from kvhub.store.recover import put_back
from kvhub.store.recover import unregistered as unregistered_in
from kvhub_registry import State


def lock_of(manifest, path: Path) -> None:  # type: ignore[no-untyped-def]
    entry = LockedMapper(
        digest=manifest.digest, repo="o/m", commit="a" * 40, source="a", target="b", files=manifest.files
    )
    write_lock(path, Lock(mappers=[entry]))


def test_only_what_nothing_keeps_goes(home: Settings, tmp_path: Path) -> None:
    ready, draft, plain, named, locked = (stored(home, n, top1=None if n == 1 else 0.95) for n in range(5))
    for manifest in (plain, named, locked):
        retire(manifest.digest, why="old")
    name("prod", named.digest, why="")
    lock_of(locked, tmp_path / "kvhub.lock")
    roots.remember(tmp_path / "kvhub.lock", home)

    would = collect(home, dry_run=True)
    assert [item.row.digest for item in would.garbage if item.row] == [plain.digest]
    assert {kept.digest for kept in would.kept} == {named.digest, locked.digest}
    assert find(plain.digest)
    done = collect(home)
    assert done.size >= plain.size
    with pytest.raises(NotFound):
        find(plain.digest)
    assert {path.name for path in home.mappers.iterdir()} - {".lock"} == {
        m.digest for m in (ready, draft, named, locked)
    }
    assert len(list((home.home / "blobs").iterdir())) == 4
    assert collect(home, drafts=True).garbage == []  # young
    (tmp_path / "kvhub.lock").unlink()  # the project is gone, and with it what kept this mapper
    gone = collect(home, drafts=True, grace=0).garbage
    assert {item.row.digest for item in gone if item.row} == {draft.digest, locked.digest}


def test_a_lock_file_that_is_missing_for_a_while(home: Settings, tmp_path: Path) -> None:
    """Another branch is checked out, and back again: nothing that only looks forgets the file."""
    manifest, path = stored(home), tmp_path / "kvhub.lock"
    lock_of(manifest, path)
    roots.remember(path, home)
    retire(manifest.digest, why="old")
    (note,) = (home.home / "roots").iterdir()
    before, away = note.read_bytes(), path.rename(tmp_path / "away")
    assert "missing" in next(f for f in examine(home, ask_hub=False) if f.name == "store").found
    would = collect(home, dry_run=True)
    assert (would.garbage, would.absent, note.read_bytes()) == ([], [path], before)
    assert collect(home, dry_run=True, grace=0).garbage  # as that gc would
    assert collect(home).garbage == []  # a real one only notes since when
    assert note.read_bytes() != before
    away.rename(path)
    assert (collect(home).garbage, note.read_bytes()) == ([], before)
    path.unlink()
    assert collect(home).garbage == []
    found = json.loads(note.read_text())
    note.write_text(json.dumps(found | {"missing": found["missing"] - 2 * roots.GRACE}))
    assert [item.row.digest for item in collect(home, dry_run=True).garbage if item.row] == [manifest.digest]
    assert note.exists()
    assert [item.row.digest for item in collect(home).garbage if item.row] == [manifest.digest]
    assert not note.exists()


def test_a_lock_that_cannot_be_read_stops_everything(home: Settings, tmp_path: Path) -> None:
    retire(stored(home).digest, why="old")
    (tmp_path / "kvhub.lock").write_text("{")
    roots.remember(tmp_path / "kvhub.lock", home)
    with pytest.raises(Corrupt):
        collect(home)
    assert len(list(home.mappers.glob("[0-9a-f]*"))) == 1


def test_a_loaded_mapper_stays_until_its_process_ends(home: Settings) -> None:
    manifest = stored(home)
    retire(manifest.digest, why="old")
    code = (
        "import sys\nfrom kvhub.store.use import hold\nhold(sys.argv[1])\nprint('held', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, manifest.digest],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        (kept,) = collect(home).kept
        assert kept.by == "a process has it loaded"
        process.kill()
        process.wait()
    assert [item.row.digest for item in collect(home).garbage if item.row] == [manifest.digest]


def test_what_killed_processes_left(home: Settings) -> None:
    manifest = stored(home)
    half = "0" * 64
    for left in (f".{manifest.digest}.abc", ".fit-abc", ".removed-x", half):
        (home.mappers / left).mkdir(exist_ok=True)
    (home.home / "blobs" / ".0123456789ab").write_bytes(b"x")
    assert {item.path.name for item in collect(home).garbage} == {".removed-x", ".0123456789ab"}
    old = time.time() - 7200
    names = {f".{manifest.digest}.abc", ".fit-abc", half}
    for name_ in names:
        os.utime(home.mappers / name_, (old, old))
    assert {item.path.name for item in collect(home).garbage} == names
    assert collect(home).garbage == []
    verify_artifact(home.mappers / manifest.digest, deep=True)


def test_a_leftover_under_every_name(home: Settings) -> None:
    """Each name that something unfinished has, once its process is gone; what a living one holds stays."""
    digest = stored(home).digest
    process = subprocess.Popen(["true"])
    process.wait()
    tags = (
        "fit-x",
        "import-x",
        "quantize-x",
        "pull-aaaaaaaaaaaa",
        f"{digest}.abcdefgh",
        ".import-x.abcdefgh",
    )
    made = [home.mappers / f".{tag}" for tag in tags]
    for path in made:
        path.mkdir()
        (path / "big").write_bytes(b"x" * 1000)
    made += [home.mappers / ".pull-bbbbbbbbbbbb.lock"]
    writing = f".writing-{process.pid}-abcdef01"
    for folder in ("mappers", "", "roots", "pulled", "cache", "cache/datasets"):
        made.append(home.home / folder / writing)
    made.append(home.home / "serving" / ".cost-0123.json.abcdefgh")
    made.append(home.cache / "fingerprints" / "tmpabcdefgh")
    for path in made[len(tags) :]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    alive, lock = home.mappers / ".pull-cccccccccccc", home.mappers / ".pull-cccccccccccc.lock"
    ours = home.home / f".writing-{os.getpid()}-abcdef01"
    alive.mkdir()
    ours.write_bytes(b"x")
    assert [item.path for item in collect(home).garbage] == []  # young
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        would, done = collect(home, dry_run=True, grace=0), collect(home, grace=0)
        assert {item.path for item in done.garbage} == {item.path for item in would.garbage} == set(made)
        assert done.size >= len(tags) * 1000
        assert not [path for path in made if path.exists()] and alive.exists() and ours.exists()
    assert [item.path for item in collect(home).garbage] == [alive]  # whose lock is free: at once
    assert not alive.exists() and not lock.exists()


def test_what_kvhub_did_not_put_there_stays_and_is_named(home: Settings) -> None:
    stored(home)
    make_artifact(home.mappers / "orphan", seed=5)
    (home.home / "blobs" / "notes.txt").write_bytes(b"x")
    (home.mappers / ".DS_Store").write_bytes(b"x")
    (home.mappers / "notes").mkdir()
    done = collect(home, unregistered=True, grace=0)
    assert done.garbage == []
    assert {item.path.name for item in done.foreign} == {"orphan", "notes.txt", ".DS_Store", "notes"}
    assert all(item.path.exists() for item in done.foreign)


def without_row(home: Settings, seed: int) -> Manifest:
    """A mapper in the store whose row is lost."""
    manifest = stored(home, seed)
    with open_registry(home) as registry:
        registry.remove(manifest.digest)
    os.utime(home.mappers / manifest.digest, (1, 1))
    return manifest


def test_a_mapper_without_a_row_goes_on_request_alone(home: Settings, tmp_path: Path) -> None:
    stored(home, 0)
    lost, locked, used = (without_row(home, seed) for seed in (1, 2, 3))
    lock_of(locked, tmp_path / "kvhub.lock")
    roots.remember(tmp_path / "kvhub.lock", home)
    code = "import sys\nfrom kvhub.store.use import hold\nhold(sys.argv[1])\nprint(1, flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code, used.digest], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline()
        done = collect(home)
        assert done.garbage == []
        assert {s.path.name for s in done.unregistered} == {lost.digest, locked.digest, used.digest}
        done = collect(home, unregistered=True)
        assert [item.path.name for item in done.garbage] == [lost.digest]
        assert {kept.digest for kept in done.kept} == {locked.digest, used.digest}
        for manifest in (locked, used):
            verify_artifact(home.mappers / manifest.digest, deep=True)
            (home.mappers / manifest.digest / "manifest.json").write_text("{")
        done = collect(home, unregistered=True, grace=0)  # also where their manifest cannot be read any more
        assert (done.garbage, {kept.digest for kept in done.kept}) == ([], {locked.digest, used.digest})
        process.kill()


@pytest.mark.parametrize("lost", ["gone", "empty", "elsewhere"])
def test_a_registry_that_names_nothing_stops_everything_and_register_mends_it(
    home: Settings, tmp_path: Path, lost: str
) -> None:
    passes, draft = stored(home, 1), stored(home, 2, top1=0.3)
    for path in home.mappers.iterdir():
        os.utime(path, (1, 1))
    for part in ("-wal", "-shm"):
        Path(f"{home.database_file}{part}").unlink(missing_ok=True)
    assert home.database_file is not None
    if lost == "elsewhere":
        home = replace(home, database_url=f"sqlite:///{tmp_path / 'other.db'}")
    elif lost == "empty":
        home.database_file.write_bytes(b"")
    else:
        home.database_file.unlink()
    for unregistered in (False, True):
        with pytest.raises(Corrupt, match="names no mapper, but 2"):
            collect(home, unregistered=unregistered, grace=0)
    rows = [put_back(path, home) for path in unregistered_in(home)]
    assert {row.digest: row.state for row in rows} == {
        passes.digest: State.READY,
        draft.digest: State.DRAFT,
    }
    assert (collect(home, grace=0).garbage, unregistered_in(home)) == ([], [])


def test_a_shared_registry_keeps_rows_and_other_machines_files(home: Settings, tmp_path: Path) -> None:
    shared = f"sqlite:///{tmp_path / 'team.db'}"
    ours, theirs = replace(home, database_url=shared), Settings(tmp_path / "b", shared, False)
    manifest, other = stored(ours, 1), stored(theirs, 2)
    shutil.copytree(ours.mappers / manifest.digest, theirs.mappers / manifest.digest)
    lock_of(manifest, tmp_path / "kvhub.lock")
    roots.remember(tmp_path / "kvhub.lock", theirs)
    for one in (manifest, other):
        retire(one.digest, why="old", settings=ours)
    assert [item.row.digest for item in collect(ours).garbage if item.row] == [manifest.digest]
    assert not (ours.mappers / manifest.digest).exists()
    assert find(manifest.digest, ours).state is find(other.digest, ours).state is State.RETIRED
    done = collect(theirs, grace=0)
    assert [kept.digest for kept in done.kept] == [manifest.digest]
    assert [item.row.digest for item in done.garbage if item.row] == [other.digest]
    verify_artifact(theirs.mappers / manifest.digest, deep=True)


@pytest.mark.parametrize("what", ["promoted", "named", "locked"])
def test_what_is_wanted_again_after_gc_has_listed_it_stays(
    home: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    manifest = stored(home)
    retire(manifest.digest, why="old")
    real = collecting.remove_locked

    def meanwhile(*arguments: object, **options: object) -> object:
        if what == "promoted":
            promote(manifest.digest, why="it was better")
        elif what == "named":
            name("prod", manifest.digest, why="")
        else:
            lock_of(manifest, tmp_path / "kvhub.lock")
            roots.remember(tmp_path / "kvhub.lock", home)
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(collecting, "remove_locked", meanwhile)
    done = collect(home)
    assert (done.garbage, [kept.digest for kept in done.kept]) == ([], [manifest.digest])
    verify_artifact(home.mappers / manifest.digest, deep=True)
    assert find(manifest.digest).state is (State.READY if what == "promoted" else State.RETIRED)


def test_a_row_that_cannot_be_removed_keeps_its_files(
    home: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = stored(home)
    retire(manifest.digest, why="old")

    def full(*_: object) -> object:
        raise RuntimeError("database or disk is full")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr("kvhub_registry.queries.unreferenced", full)
        collect(home)
    assert find(manifest.digest).state is State.RETIRED
    verify_artifact(home.mappers / manifest.digest, deep=True)


WORKER = """
import sys
from pathlib import Path
from kvhub.artifact.read import read_manifest
from kvhub.catalog import register
from kvhub.settings import Settings
from kvhub.store.collect import collect
from kvhub.store.health import examine
from kvhub.store.lifecycle import name, promote, retire
settings = Settings.load()
for turn, made in enumerate(sorted(Path(sys.argv[1]).iterdir())):
    manifest = read_manifest(made)
    place = made.rename(settings.mappers / manifest.digest)
    register(place, manifest, settings)
    promote(manifest.digest, why="worker")
    name("prod", manifest.digest, why="worker")
    if turn:
        retire(manifest.digest, why="worker")
    collect(settings)
assert "torch" not in sys.modules
"""


def test_eight_processes_at_once(home: Settings, tmp_path: Path) -> None:
    home.mappers.mkdir(parents=True)
    for n in range(16):
        publishable(tmp_path / "made" / str(n // 2) / str(n % 2), seed=n)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path / "made" / str(n))], stderr=subprocess.PIPE, text=True
        )
        for n in range(8)
    ]
    for process in workers:
        _, err = process.communicate(timeout=250)
        assert process.returncode == 0, err
    collect(home, grace=0)
    with open_registry(home) as registry:
        rows = registry.list()
    prod = find("@prod").digest
    assert {row.state.value for row in rows if row.digest != prod} == {"ready"}
    assert len(rows) in (8, 9)  # one a worker, and the retired one that @prod may still name
    for row in rows:
        verify_artifact(Path(row.path), deep=True)
    assert {path.name for path in home.mappers.iterdir()} - {".lock"} == {row.digest for row in rows}


def test_a_home_that_was_moved_keeps_its_mappers(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry's paths are those of before; a digest under the new home is still a mapper's."""
    manifests = [stored(home, n) for n in range(2)]
    moved = home.home.rename(home.home.with_name("moved"))
    monkeypatch.setenv("KVHUB_HOME", str(moved))
    here = Settings.load()
    for manifest in manifests:
        os.utime(here.mappers / manifest.digest, (1, 1))  # long past any grace
    assert collect(here).garbage == []
    for manifest in manifests:
        assert verify_artifact(here.mappers / manifest.digest, deep=True).digest == manifest.digest
