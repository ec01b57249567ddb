"""A registry on a disk that is full says so, changes nothing, and goes on when there is room."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.records import mapper_record
from support.small_disk import filled, small_disk

from kvhub_registry import Full, Registry
from kvhub_registry.listing import quick_list
from kvhub_registry.quick import quick_get


def test_a_new_registry(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        url = f"sqlite:///{disk}/home/registry.db"
        for leave in (0, 8 << 10, 40 << 10):
            with filled(disk, leave), pytest.raises(Full, match="is full"):
                Registry.open(url)
        with Registry.open(url) as registry:
            assert registry.list() == []


def test_a_registry_with_mappers(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        database = disk / "registry.db"
        first, second = mapper_record(0), mapper_record(1)
        with Registry.open(f"sqlite:///{database}") as registry:
            registry.register(first)
        with (
            filled(disk),
            pytest.raises(Full, match="is full"),
            Registry.open(f"sqlite:///{database}") as registry,
        ):
            registry.register(second)
        with filled(disk):  # what is there can be read
            found = quick_get(database, first.digest)
            assert found is not None and found[0].digest == first.digest
            listed = quick_list(database)
            assert listed is not None and [one.digest for one in listed] == [first.digest]
        with Registry.open(f"sqlite:///{database}") as registry:
            assert [row.digest for row in registry.list()] == [first.digest] and not registry.health()
            registry.register(second)
        assert quick_get(database, second.digest) is not None


def test_a_largest_file_size_is_not_damage(tmp_path: Path) -> None:
    database = tmp_path / "registry.db"
    with Registry.open(f"sqlite:///{database}") as registry:
        registry.register(mapper_record(0))
    program = (
        "import resource, sys; from kvhub_registry import Full, Registry\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    with Registry.open(sys.argv[1]) as registry: registry.remove(sys.argv[2])\n"
        "except Full as error: print(error, error.hint)\n"
    )
    given = [sys.executable, "-c", program, f"sqlite:///{database}", mapper_record(0).digest]
    said = subprocess.run(given, capture_output=True, text=True, check=False)
    assert "could not be" in said.stdout and "ulimit" in said.stdout, said.stderr
    with Registry.open(f"sqlite:///{database}") as registry:
        assert len(registry.list()) == 1 and not registry.health()
