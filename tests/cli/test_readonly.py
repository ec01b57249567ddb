"""A home that may be read and not written: somebody else's, a snapshot, a read-only mount."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.readonly import as_reader, open_directory
from support.stored import stored

from kvhub.catalog import open_registry
from kvhub_registry.connect import make_engine, parse
from kvhub_registry.files import may_write, read_only_address


@pytest.fixture
def reader(shell) -> Iterator[object]:  # type: ignore[no-untyped-def]
    with open_directory() as root:
        shell.environment |= {"KVHUB_HOME": str(root / "home"), "HOME": str(root)}
        yield shell


def test_what_only_reads_works(reader) -> None:  # type: ignore[no-untyped-def]
    digest = stored(reader.settings, 1).digest
    with open_registry(reader.settings) as registry:
        registry.set_alias("prod", digest)
    asked = (
        ("list",),
        ("list", "--format", "json"),
        ("search", "--local", "large", "--format", "json"),
        ("info", "@prod"),
        ("verify", "prod", "--deep"),
        ("alias",),
        ("matrix", "--format", "json"),
    )
    expected = [reader.run(*command).stdout for command in asked]
    reader.run("retire", digest, "--why", "loads what it needs")
    reader.run("promote", digest)
    expected[3] = reader.run("info", "@prod").stdout
    expected[1] = reader.run("list", "--format", "json").stdout
    reader.run("matrix", "--format", "json")
    home = reader.settings.home

    def run() -> list[str]:
        assert not may_write(home)
        found = [reader.run(*command).stdout for command in asked]
        assert "registry" in reader.run("retire", digest, "--why", "x", code=4).stderr
        assert "may not be written" in reader.run("doctor", "--no-hub", code=1).stdout
        return found

    reader.run("doctor", "--no-hub")
    found = as_reader(home, run)
    for command, one, two in zip(asked, expected, found, strict=True):
        if command[0] != "matrix":  # ages
            assert one == two, command


def test_a_log_that_another_process_left_is_read_too(tmp_path: Path) -> None:
    """A reader opens as immutable only where no log waits: what stands there would be missed."""
    with open_directory() as root:
        path = root / "registry.db"
        writer = sqlite3.connect(path)
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("PRAGMA wal_autocheckpoint=0")
        writer.execute("CREATE TABLE t (x)")
        writer.execute("INSERT INTO t VALUES (7)")
        writer.commit()

        def read() -> tuple[bool, object]:
            with sqlite3.connect(read_only_address(path), uri=True) as connection:
                return "immutable" in read_only_address(path), connection.execute(
                    "SELECT x FROM t"
                ).fetchone()

        assert as_reader(root, read) == (False, (7,))
        writer.close()
        assert as_reader(root, lambda: ("immutable" in read_only_address(path), read()[1])) == (True, (7,))
        engine = make_engine(parse(f"sqlite:///{path}"), read_only=True)
        assert "mode=ro" in str(engine.url) or engine.url.query["mode"] == "ro"
