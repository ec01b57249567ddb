"""gc: what goes, what stays, and eight processes at once."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.published import make_artifact, publishable
from support.stored import stored

from kvhub.artifact.read import verify_artifact
from kvhub.catalog import find, open_registry
from kvhub.errors import Corrupt, NotFound
from kvhub.hub.lockfile import Lock, LockedMapper, write_lock
from kvhub.settings import Settings
from kvhub.store import roots
from kvhub.store.collect import collect
from kvhub.store.lifecycle import name, retire


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
    assert {kept.row.digest for kept in would.kept} == {named.digest, locked.digest}
    assert find(plain.digest)
    done = collect(home)
    assert done.size >= plain.size
    with pytest.raises(NotFound):
        find(plain.digest)
    assert {path.name for path in home.mappers.iterdir()} - {".lock"} == {
        m.digest for m in (ready, draft, named, locked)
    }
    assert len(list((home.home / "blobs").iterdir())) == 4
    (tmp_path / "kvhub.lock").unlink()  # the project is gone, and with it what kept this mapper
    assert [item.row.digest for item in collect(home).garbage if item.row] == [locked.digest]
    assert collect(home, drafts=True).garbage == []  # young
    gone = collect(home, drafts=True, grace=0).garbage
    assert [item.row.digest for item in gone if item.row] == [draft.digest]


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
    make_artifact(home.mappers / "orphan", seed=5)
    for left in (f".{manifest.digest}.abc", ".removed-x", "orphan"):
        (home.mappers / left).mkdir(exist_ok=True)
    (home.home / "blobs" / ".half").write_bytes(b"x")
    assert {item.path.name for item in collect(home).garbage} == {".removed-x", ".half"}
    old = time.time() - 7200
    for path in (home.mappers / f".{manifest.digest}.abc", home.mappers / "orphan"):
        os.utime(path, (old, old))
    assert {item.path.name for item in collect(home).garbage} == {f".{manifest.digest}.abc", "orphan"}
    assert collect(home).garbage == []
    verify_artifact(home.mappers / manifest.digest, deep=True)


def test_equal_shards_are_one_file(home: Settings) -> None:
    from support.mappers import make_identity, make_manifest, random_tensors

    from kvhub.artifact.write import write_artifact
    from kvhub.catalog import register

    made = []
    for day in ("01", "02"):
        manifest = make_manifest(
            make_identity("a/a"), make_identity("b/b"), created=f"2026-01-{day}T00:00:00Z"
        )
        manifest = write_artifact(home.mappers / day, manifest, random_tensors(manifest))
        register(home.mappers / day, manifest, home)
        made.append(manifest)
    one, two = (home.mappers / day / "model.safetensors" for day in ("01", "02"))
    assert one.samefile(two)
    assert made[0].digest != made[1].digest
    verify_artifact(home.mappers / "01", deep=True)


def bytes_on_disk(home: Settings) -> int:
    """Of mappers and blobs, a file with several names once."""
    found = [p.lstat() for folder in (home.mappers, home.home / "blobs") for p in folder.rglob("*")]
    return sum({(f.st_dev, f.st_ino): f.st_size for f in found if not stat.S_ISDIR(f.st_mode)}.values())


@pytest.mark.parametrize("shared", [True, False])
def test_gc_counts_bytes_once_and_says_before_what_it_does(home: Settings, shared: bool) -> None:
    from support.mappers import make_identity, make_manifest, random_tensors

    from kvhub.artifact.write import write_artifact
    from kvhub.catalog import register

    made = []
    for day in ("01", "02", "03"):
        manifest = make_manifest(
            make_identity("a/a"), make_identity("b/b"), created=f"2026-01-{day}T00:00:00Z"
        )
        tensors = random_tensors(manifest, 0 if shared else int(day))
        manifest = write_artifact(home.mappers / "new", manifest, tensors)
        register((home.mappers / "new").rename(home.mappers / manifest.digest), manifest, home)
        made.append(manifest)
    assert len(list((home.home / "blobs").iterdir())) == (1 if shared else 3)
    for several in (made[:1], made[1:]):
        for manifest in several:
            retire(manifest.digest, why="old")
        would = collect(home, dry_run=True)
        before = bytes_on_disk(home)
        done = collect(home)
        assert would.size == done.size == before - bytes_on_disk(home)
        assert [(i.kind, i.size) for i in would.garbage] == [(i.kind, i.size) for i in done.garbage]
    assert done.size > made[1].size
    assert bytes_on_disk(home) == 0


def test_a_damaged_blob_is_not_spread(home: Settings) -> None:
    from kvhub.catalog import register

    manifest = stored(home, 1)
    path = home.mappers / manifest.digest
    blob = next((home.home / "blobs").iterdir())
    data = bytearray(blob.read_bytes())
    blob.unlink()
    data[-1] ^= 1
    blob.write_bytes(data)
    register(path, manifest, home)
    verify_artifact(path, deep=True)
    assert blob.samefile(path / "model.safetensors")


WORKER = """
import sys
from pathlib import Path
from kvhub.artifact.read import read_manifest
from kvhub.catalog import register
from kvhub.settings import Settings
from kvhub.store.collect import collect
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
