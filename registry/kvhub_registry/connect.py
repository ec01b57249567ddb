"""Engines and transactions: one writer at a time, on SQLite and on PostgreSQL.

A deferred read-modify-write loses updates between processes (87 of 320 in a
trial with eight), so every write transaction here begins with the lock:
`BEGIN IMMEDIATE` on SQLite, a transaction-level advisory lock on PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool
from sqlmodel import Session

from kvhub_registry.errors import (
    BadAddress,
    Damaged,
    Denied,
    Full,
    NotRegistered,
    RegistryError,
    Unavailable,
)
from kvhub_registry.files import has_room, read_only_address

BUSY_SECONDS = 60
LOCK_KEY = 0x6B76687562  # "kvhub"
_REMOTE = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "lustre",
    "9p",
    "afs",
    "ceph",
    "gpfs",
    "beegfs",
    "glusterfs",
}


def parse(url: str | Path) -> URL:
    """A checked URL: a SQLite file or PostgreSQL through psycopg. Raises `BadAddress`.

    A `Path` is a SQLite file whatever its name: in a URL `?` begins options and `%41` is an A.
    """
    if isinstance(url, Path):
        return URL.create("sqlite", database=str(url))
    hint = "set KVHUB_DATABASE_URL to sqlite:///FILE or postgresql://USER@HOST/DATABASE, or unset it"
    try:
        parsed = make_url(url)
        dialect = parsed.get_backend_name()
    except (ArgumentError, ValueError):  # the text may hold a password: say nothing of it
        raise BadAddress("the database URL cannot be read", hint) from None
    if dialect == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise BadAddress("the registry needs a database file, not a database in memory", hint)
        if parsed.query or parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
            raise BadAddress("a SQLite URL is sqlite:///FILE, without options", hint)
        return parsed
    if dialect == "postgresql":
        return parsed.set(drivername="postgresql+psycopg")
    raise BadAddress(f"no registry on {dialect!r}: SQLite and PostgreSQL are supported", hint)


def where(url: URL) -> str:
    """The place in words, never with a password."""
    if url.get_backend_name() == "sqlite":
        return unquote(str(url.database).removeprefix("file:")) if url.query else str(url.database)
    return f"PostgreSQL at {url.host or 'the local socket'}/{url.database or ''}"


def journal_mode(path: Path, mounts: str) -> str:
    """WAL needs shared memory of one host, so a network file system gets a rollback journal.

    mounts: the text of /proc/mounts (empty where there is none).
    """
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        mount = fields[1].replace("\\040", " ")
        inside = str(path) == mount or str(path).startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return "DELETE" if kind in _REMOTE or kind.startswith("fuse.") else "WAL"


def make_engine(url: URL, *, read_only: bool = False) -> Engine:
    """An engine for a parsed URL; creates the directory of a SQLite file (0700). Connects to nothing."""
    if url.get_backend_name() != "sqlite":
        try:
            patience = {} if "connect_timeout" in url.query else {"connect_timeout": 10}
            return create_engine(url, pool_pre_ping=True, connect_args=patience)
        except ModuleNotFoundError:
            raise BadAddress("PostgreSQL needs psycopg", 'pip install "kvhub[postgres]"') from None
    path = Path(str(url.database)).expanduser().absolute()
    if read_only:
        if not path.exists():
            raise NotRegistered(f"there is no registry at {path}", "kvhub fit or kvhub pull makes one")
        return _sqlite(_read_only(path), None)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Denied(
            f"the registry's directory {path.parent} cannot be made: {error.strerror}", "set KVHUB_HOME"
        ) from None
    return _sqlite(URL.create("sqlite", database=str(path)), journal_mode(path, _mounts()))


def _mounts() -> str:
    try:
        return Path("/proc/mounts").read_text("utf-8", "replace")
    except OSError:
        return ""


def _read_only(path: Path) -> URL:
    address, _, options = read_only_address(path).partition("?")
    query = {"uri": "true"} | dict(option.split("=") for option in options.split("&"))
    return URL.create("sqlite", database=address, query=query)


def _sqlite(url: URL, journal: str | None) -> Engine:
    # NullPool: a connection never crosses a fork or a thread.
    engine = create_engine(url, poolclass=NullPool)

    @event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # BEGIN is ours, below
        try:
            _prepare(connection, Path(str(url.database)), journal)
        except BaseException:
            connection.close()  # nobody else would before it is collected
            raise

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(f"BEGIN {connection.get_execution_options().get('begin', 'DEFERRED')}")

    return engine


def _prepare(connection: Any, path: Path, journal: str | None) -> None:
    cursor = connection.cursor()
    if journal == "WAL" and _is_tight(path):
        # The log's index in memory instead of a file: else nothing could be read, nor removed.
        cursor.execute("PRAGMA locking_mode=EXCLUSIVE")
    # Before the journal mode: changing that takes a lock itself.
    cursor.execute(f"PRAGMA busy_timeout={BUSY_SECONDS * 1000}")
    if journal:
        cursor.execute(f"PRAGMA journal_mode={journal}")
        cursor.execute("PRAGMA synchronous=NORMAL" if journal == "WAL" else "PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _is_tight(path: Path) -> bool:
    """Whether a full disk has no room for the index of SQLite's log, and no other process has made one."""
    made = path.exists() and path.stat().st_size > 0
    return made and not has_room(path.parent) and not path.with_name(f"{path.name}-shm").exists()


@contextmanager
def reading(engine: Engine) -> Iterator[Session]:
    """A consistent snapshot; errors become `RegistryError`."""
    with translated(engine.url), Session(engine) as session, session.begin():
        yield session


@contextmanager
def writing(engine: Engine) -> Iterator[Session]:
    """A transaction that holds the write lock from its first statement: all or nothing."""
    locked = engine.execution_options(begin="IMMEDIATE")
    with translated(engine.url), Session(locked) as session, session.begin():
        connection = session.connection()
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK_KEY})
        yield session


@contextmanager
def translated(url: URL) -> Iterator[None]:
    """Driver errors as one-line `RegistryError`s."""
    try:
        yield
    except DBAPIError as error:
        detail = str(error.orig).strip()
        if "disk i/o error" in detail.lower() and not has_room(Path(where(url)).parent):
            detail = "disk is full"  # SQLite's word where it cannot make its log's index
        if url.get_backend_name() == "postgresql":
            raise _explain_server(detail, where(url), connecting=error.statement is None) from error
        raise _explain(detail, where(url)) from error
    except SQLAlchemyError as error:
        raise RegistryError(f"the registry at {where(url)} failed: {type(error).__name__}") from error


def _explain(detail: str, place: str) -> RegistryError:
    line = detail.splitlines()[0] if detail else "no detail"
    low = detail.lower()
    rebuild = "move the file away; kvhub register puts the mappers that are here back"
    if "not a database" in low or "malformed" in low:
        return Damaged(f"the registry at {place} is damaged: {line}", rebuild)
    if "disk i/o error" in low:  # also what a quota and a largest file size look like: no sign of damage
        return Full(
            f"the registry at {place} could not be read or written: {line}",
            "check the space, the quota and the file size limit there (df, quota, ulimit -f), then try again",
        )
    if "database is locked" in low:
        return Unavailable(f"another process holds the registry at {place}", "wait for it, then try again")
    if "disk is full" in low or "no space left" in low:
        return Full(f"the disk of the registry at {place} is full", "make room, then try again")
    if "unable to open" in low or "readonly" in low or "permission denied" in low:
        return Denied(
            f"the registry at {place} cannot be opened: {line}", "check its owner, or set KVHUB_HOME"
        )
    return RegistryError(f"the registry at {place} failed: {line}")


_LOGIN = ("authentication failed", "no pg_hba.conf entry", "no password supplied", "not permitted to log in")


def _explain_server(detail: str, place: str, *, connecting: bool) -> RegistryError:
    """connecting: the error is of no statement, so there is no connection. Options may hold a password."""
    low = detail.lower()
    hint = "check KVHUB_DATABASE_URL and that the server runs"
    absent = "does not exist" in low
    if any(text in low for text in _LOGIN) or (connecting and absent and 'role "' in low):
        return Denied(f"{place} refuses the login", "check the user and password of KVHUB_DATABASE_URL")
    if connecting and absent and 'database "' in low:
        return BadAddress(f"there is no database {place}", "createdb makes one, or check KVHUB_DATABASE_URL")
    if "permission denied" in low:
        return Denied(
            f"{place} forbids this: {_reason(detail)}", "check the rights of the user in KVHUB_DATABASE_URL"
        )
    if "could not extend file" in low or "no space left" in low or "disk is full" in low:
        return Full(f"the disk of the registry at {place} is full", "make room, then try again")
    if connecting and ("invalid " in low or "unsupported" in low):
        return BadAddress("the options in the database URL are none of PostgreSQL's", hint)
    if "fatal:" in low or ("ssl" in low and connecting):  # the server did answer
        return Unavailable(f"{place} ends the connection: {_reason(detail)}", hint)
    if connecting or "connection" in low or "timeout" in low:
        return Unavailable(f"{place} does not answer", hint)
    return RegistryError(f"the registry at {place} failed: {_reason(detail)}")


def _reason(detail: str) -> str:
    """What went wrong, without the driver's words around it."""
    line = detail.splitlines()[0] if detail else "no detail"
    return line.rpartition("FATAL:")[2].rpartition(" failed: ")[2].strip()
