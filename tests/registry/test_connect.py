"""URLs, their secrets, and where WAL may be used."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from kvhub_registry import BadAddress, Registry, RegistryError, Unavailable
from kvhub_registry.connect import journal_mode, make_engine, parse, where
from kvhub_registry.errors import Denied

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/export /home nfs4 rw 0 0
tmpfs /home/me/fast\\040disk tmpfs rw 0 0
host /mnt/s fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("/var/lib/registry.db", "WAL"),
        ("/home/me/registry.db", "DELETE"),
        ("/home/me/fast disk/registry.db", "WAL"),
        ("/homeless/registry.db", "WAL"),
        ("/mnt/s/registry.db", "DELETE"),
    ],
)
def test_no_wal_on_a_network_file_system(path: str, mode: str) -> None:
    assert journal_mode(Path(path), MOUNTS) == mode
    assert journal_mode(Path(path), "") == "WAL"


def test_sqlite_pragmas_and_private_directory(tmp_path: Path) -> None:
    Registry.open(f"sqlite:///{tmp_path}/a/b/r.db").close()
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    with make_engine(parse(f"sqlite:///{tmp_path}/a/b/r.db")).connect() as connection:
        values = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "foreign_keys", "busy_timeout")
        }
    assert values == {"journal_mode": "wal", "foreign_keys": 1, "busy_timeout": 60000}


@pytest.mark.parametrize(
    "url",
    [
        "no url s3cret",
        "postgresql://me:s3cret@host:notaport/db",
        "mysql://me:s3cret@host/db",
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///x.db?mode=s3cret",
        "",
    ],
)
def test_a_url_that_cannot_be_used_is_named_without_its_secret(url: str) -> None:
    with pytest.raises(BadAddress) as caught:
        Registry.open(url)
    assert "s3cret" not in f"{caught.value.message} {caught.value.hint}"


def test_a_silent_server_is_named_without_the_password() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for url in (
        f"postgresql://me:s3cret@127.0.0.1:{port}/db",
        f"postgresql://me@127.0.0.1:{port}/db?password=s3cret",
    ):
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1/db") as caught:
            Registry.open(url)
        assert "s3cret" not in f"{caught.value.message} {caught.value.hint}"
        assert "s3cret" not in where(parse(url))


def opened(url: str) -> RegistryError:
    """How a server that cannot be used is refused."""
    with pytest.raises(RegistryError) as caught:
        Registry.open(url)
    said = f"{caught.value.message} {caught.value.hint}"
    assert "s3cret" not in said and "KVHUB_DATABASE_URL" in caught.value.hint
    return caught.value


def test_a_host_that_has_no_address() -> None:
    error = opened("postgresql://me:s3cret@no-such-host.invalid/db")
    assert isinstance(error, Unavailable) and "no-such-host.invalid/db does not answer" in error.message


def test_a_server_that_takes_the_connection_and_says_nothing() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        error = opened(f"postgresql://me:s3cret@127.0.0.1:{silent.getsockname()[1]}/db?connect_timeout=2")
    assert isinstance(error, Unavailable)


def test_options_that_postgresql_has_not() -> None:
    for option in ("sslmode=s3cret", "s3cret=1"):
        assert isinstance(opened(f"postgresql://me@127.0.0.1/db?{option}"), BadAddress)


def test_what_a_server_that_answers_refuses(postgres_url: str) -> None:
    absent = opened(postgres_url.rpartition("/")[0] + "/nope")
    assert isinstance(absent, BadAddress) and "there is no database" in absent.message
    unknown = opened(postgres_url.replace("//kvhub@", "//nobody:s3cret@"))
    assert isinstance(unknown, Denied) and "refuses the login" in unknown.message
    insecure = opened(postgres_url + "?sslmode=require")
    assert isinstance(insecure, Unavailable) and "SSL" in insecure.message


def test_errors_are_one_family() -> None:
    assert issubclass(Unavailable, RegistryError)
