"""A PostgreSQL server of our own for one test session: temp directory, loopback, no durability."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Missing(Exception):
    """Why there is no PostgreSQL here."""


def binaries() -> Path:
    """The newest directory with initdb and pg_ctl. Raises `Missing`."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: int(p.parts[-3]))
    on_path = shutil.which("initdb")
    if not found and not on_path:
        raise Missing("initdb is not on this machine (Debian: apt install postgresql)")
    return found[-1].parent if found else Path(str(on_path)).parent


@contextmanager
def server() -> Iterator[str]:
    """Start one; yields the URL of its (empty) database. Raises `Missing` where that cannot be done."""
    bin_ = binaries()
    user = None
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        try:
            user = pwd.getpwnam("postgres")
        except KeyError:
            raise Missing("running as root and there is no user postgres") from None
    root = Path(tempfile.mkdtemp(prefix="kvhub-pg-"))
    if user:
        os.chown(root, user.pw_uid, user.pw_gid)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def run(*command: str) -> None:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=root,
            user=user.pw_uid if user else None,
            group=user.pw_gid if user else None,
            env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "HOME": str(root)},
        )
        if done.returncode:
            raise Missing(f"{Path(command[0]).name} failed: {done.stderr.strip() or done.stdout.strip()}")

    data = str(root / "data")
    try:
        run(str(bin_ / "initdb"), "-D", data, "-U", "kvhub", "-A", "trust", "-N", "-E", "UTF8")
        options = f"-c listen_addresses=127.0.0.1 -p {port} -k {root} -c fsync=off -c max_connections=64"
        run(str(bin_ / "pg_ctl"), "-D", data, "-w", "-l", str(root / "log"), "-o", options, "start")
        try:
            yield f"postgresql://kvhub@127.0.0.1:{port}/postgres"
        finally:
            run(str(bin_ / "pg_ctl"), "-D", data, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(root, ignore_errors=True)
