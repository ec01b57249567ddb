"""A real Mooncake store on the loopback interface: one master, one process that owns a segment."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.server import free_port

SEGMENT = 48 << 20


def missing() -> str | None:
    """Why Mooncake cannot run here, or None."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake's client is not installed (pip install 'kvhub[mooncake]')"
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return f"Mooncake's client cannot be loaded: {error}"
    return None


def program(name: str) -> str:
    """Path of one of Mooncake's own programs (`mooncake_master`, `mooncake_client`)."""
    import mooncake

    path = Path(next(iter(mooncake.__path__))) / name
    if not os.access(path, os.X_OK):
        path.chmod(path.stat().st_mode | 0o111)
    return str(path)


@dataclass(frozen=True)
class Store:
    """A running store."""

    address: str
    master: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"mooncake://{self.address}"

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """The master accepts connections and answers nothing."""
        self.master.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.master.send_signal(signal.SIGCONT)


def start(
    stack: contextlib.ExitStack,
    folder: Path,
    name: str,
    address: tuple[str, int],
    *flags: str,
    through: Sequence[str] = (),
    seconds: float = 20,
) -> subprocess.Popen[bytes]:
    """Run one of Mooncake's programs until `stack` is left; it listens at `address`, its log is in `folder`.

    through: a command that runs it, such as one on another host.
    """
    log = stack.enter_context((folder / f"{name}.log").open("wb"))
    process = subprocess.Popen(
        [*through, program(name), *flags], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    listening(*address, process, seconds)
    return process


@contextlib.contextmanager
def store(folder: Path) -> Iterator[Store]:
    """Start a store, stop it at the end. Its logs go to `folder`."""
    host, ports = "127.0.0.1", {name: free_port() for name in ("rpc", "metrics", "client")}
    with contextlib.ExitStack() as stack:
        master = start(
            stack,
            folder,
            "mooncake_master",
            (host, ports["rpc"]),
            f"--rpc_address={host}",
            f"--rpc_port={ports['rpc']}",
            f"--metrics_host={host}",
            f"--metrics_port={ports['metrics']}",
            "--default_kv_lease_ttl=500",
        )
        start(
            stack,
            folder,
            "mooncake_client",
            (host, ports["client"]),
            f"--host={host}",
            f"--port={ports['client']}",
            f"--global_segment_size={SEGMENT}",
            "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={host}:{ports['rpc']}",
        )
        yield Store(f"{host}:{ports['rpc']}", master)


def listening(host: str, port: int, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Return when `process` accepts connections on `port`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode}")
        with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nothing listens on {host}:{port}")
