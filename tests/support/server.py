"""A real SGLang server in a process group of its own, for tests, demo and benchmarks.

    with sglang_server(MODELS / "small", flags=["--page-size", "16"]) as server:
        answer = server.generate("Once upon a time", max_new_tokens=8)

On a machine without a GPU it runs on SGLang's CPU engine, in float32.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvhub.serving import cpu

START_SECONDS = 240.0
STOP_SECONDS = 30.0


class ServerDied(RuntimeError):
    """The server ended, or did not get ready in time; the message ends with its log."""


class Streamed(NamedTuple):
    """Milliseconds to the first token and to the end of an answer, and its last event (`{}`: none came)."""

    first_ms: float
    total_ms: float
    last: dict[str, Any]


@dataclass(frozen=True)
class Server:
    """A running server. `url` without a slash at the end; `log` grows while it runs."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def generate(
        self, prompt: str | Sequence[int], max_new_tokens: int = 16, **fields: Any
    ) -> dict[str, Any]:
        """Greedy completion by `/generate`: the response's JSON (`output_ids`, `text`, `meta_info`).

        prompt: text, or token ids. fields: further fields of the request (`extra_key`, `kv_hints`, ...);
        `sampling_params` is merged with the greedy ones.
        """
        answer: dict[str, Any] = self.post("/generate", _greedy(prompt, max_new_tokens, fields))
        return answer

    def stream(
        self, prompt: str | Sequence[int], max_new_tokens: int = 16, *, timeout: float = 120, **fields: Any
    ) -> Streamed:
        """As `generate`, streamed and timed; the last event holds all tokens and the report."""
        body = {**_greedy(prompt, max_new_tokens, fields), "stream": True}
        request = urllib.request.Request(
            f"{self.url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        first, last = 0.0, b""
        started = time.perf_counter()
        with urllib.request.urlopen(request, timeout=timeout) as events:
            for line in events:
                if line.startswith(b"data: {"):
                    first, last = first or time.perf_counter() - started, line
        total = time.perf_counter() - started
        return Streamed(first * 1e3, total * 1e3, json.loads(last[6:]) if last else {})

    def post(self, path: str, body: Mapping[str, Any], *, timeout: float = 120) -> Any:
        """POST JSON, return JSON. An HTTP error is a `RuntimeError` with the body's text."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code}: {error.read().decode(errors='replace')}") from None

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Return when the server answers. Raises `ServerDied` if it ends, or takes too long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerDied(f"exit status {self.process.returncode}\n{self.log_tail()}")
            with contextlib.suppress(OSError):
                self.get("/health_generate", timeout=10)
                return
            time.sleep(0.5)
        raise ServerDied(f"not ready after {seconds:.0f} s\n{self.log_tail()}")

    def flush(self) -> None:
        """Empty the server's own cache (`/flush_cache`)."""
        request = urllib.request.Request(f"{self.url}/flush_cache", b"", method="POST")
        urllib.request.urlopen(request, timeout=60).close()

    def get(self, path: str, *, timeout: float = 60) -> str:
        """GET, return the body as text (`/metrics`, `/health_generate`, ...)."""
        with urllib.request.urlopen(self.url + path, timeout=timeout) as response:
            return str(response.read().decode())

    def log_tail(self, characters: int = 3000) -> str:
        """The end of the server's log."""
        return self.log.read_text(errors="replace")[-characters:]


def _greedy(prompt: str | Sequence[int], max_new_tokens: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a request for a greedy answer."""
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    text = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    return {**text, **fields, "sampling_params": {**sampling, **fields.get("sampling_params", {})}}


def hints(reuse: bool = True, **payload: Any) -> dict[str, Any]:
    """The `kv_hints` of a request on `/generate`."""
    action = {
        "action_id": "1",
        "action_type": "kvhub.reuse",
        "action_version": "1",
        "payload": {"reuse": reuse, **payload},
    }
    return {"protocol_version": "1", "message_id": "m", "actions": [action]}


def free_port() -> int:
    """A TCP port on the loopback interface that nobody uses now.

    Below the range that the system gives to outgoing connections: a server binds half a minute later,
    and until then one of those could take it.
    """
    while True:
        with socket.socket() as listener, contextlib.suppress(OSError):
            port = random.SystemRandom().randrange(20_000, 32_768)
            listener.bind(("127.0.0.1", port))
            return port


def server_environment(model_path: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment with what the CPU engine needs, then `extra`."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if cpu.wanted():
        architectures = json.loads((Path(model_path) / "config.json").read_text())["architectures"]
        environment.update(cpu.variables(architectures))
    return {**environment, **(extra or {})}


@contextlib.contextmanager
def sglang_server(
    model_path: Path,
    *,
    env: Mapping[str, str] | None = None,
    flags: Sequence[str] = (),
    port: int | None = None,
    dtype: str = "float32",
    log: Path | None = None,
) -> Iterator[Server]:
    """Start `python -m sglang.launch_server`, yield it when it answers, stop it at the end."""
    port = port or free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_path)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, *flags]
    if cpu.wanted():
        command += cpu.flags(flags)
    with running(command, server_environment(model_path, env), port=port, log=log) as server:
        yield server


@contextlib.contextmanager
def running(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    port: int,
    log: Path | None = None,
    cwd: Path | None = None,
    wait: bool = True,
) -> Iterator[Server]:
    """Run any command that ends up as an SGLang server on `port` (such as `kvhub serve`).

    wait: False yields at once, to start several; then call `Server.wait`.
    """
    with contextlib.ExitStack() as stack:
        if log is None:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sglang-"))) / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        stack.callback(_stop, process)
        server = Server(f"http://127.0.0.1:{port}", log, process)
        if wait:
            server.wait()
        yield server


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the main process, which ends its children; whatever is left of the group is killed."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    # The group outlives its leader while a member lives.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
