"""A small reverse proxy that chooses a model by turn, and leaves everything else of a request alone.

    python -m demo.router.proxy small=http://127.0.0.1:30001 large=http://127.0.0.1:30002 --port 8000

Clients speak the OpenAI protocol and name a model, or `auto`: then the larger one answers the user and the
smaller one continues after a tool's result. Every request asks for reuse unless it says something about it
itself. The body is passed on with all its fields: salts, `custom_params` and what comes back of kvhub.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_BODY = 32 << 20
AUTO = "auto"
_PASSED = ("Authorization", "Accept", "X-Request-Id")


def choose(body: dict[str, Any], models: list[str]) -> str:
    """The model of a request: the one it names; for `auto`, the last (largest) for a user's message and
    the first (smallest) after a tool's result."""
    if body.get("model") in models:
        return str(body["model"])
    messages = body.get("messages") or [{}]
    last = messages[-1] if isinstance(messages, list) and isinstance(messages[-1], dict) else {}
    return models[0] if last.get("role") == "tool" else models[-1]


def with_reuse(body: dict[str, Any]) -> dict[str, Any]:
    """Ask for reuse where the client says nothing of it."""
    params = body.get("custom_params")
    if params is not None and (not isinstance(params, dict) or "kvhub" in params):
        return body
    return {**body, "custom_params": {**(params or {}), "kvhub": {"reuse": True}}}


class Handler(BaseHTTPRequestHandler):
    """One request; `backends` (name -> address, smallest first) is set by `serve`."""

    backends: dict[str, str]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """`/v1/models` and `/health` are answered here; `/NAME/...` is passed to that backend."""
        if self.path == "/health":
            self._answer(200, {"models": [*self.backends]})
            return
        if self.path == "/v1/models":
            models = [{"id": name, "object": "model"} for name in (*self.backends, AUTO)]
            self._answer(200, {"object": "list", "data": models})
            return
        name, _, rest = self.path.removeprefix("/").partition("/")
        if name not in self.backends:
            self._answer(404, {"error": {"message": f"nothing at {self.path}"}})
            return
        self._forward(name, f"/{rest}", None)

    def do_POST(self) -> None:
        """Choose a backend and pass the request on."""
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 <= length <= MAX_BODY:
                raise ValueError
            body = json.loads(self.rfile.read(length))
            if not isinstance(body, dict):
                raise ValueError
        except ValueError:
            self.close_connection = True
            self._answer(400, {"error": {"message": "the body is no JSON object, or too large"}})
            return
        name = choose(body, [*self.backends])
        self._forward(name, self.path, json.dumps({**with_reuse(body), "model": name}).encode())

    def _forward(self, name: str, path: str, body: bytes | None) -> None:
        headers = {key: self.headers[key] for key in _PASSED if key in self.headers}
        headers |= {"Content-Type": "application/json"} if body is not None else {}
        request = urllib.request.Request(self.backends[name] + path, body, headers)
        try:
            answer = urllib.request.urlopen(request, timeout=3600)
        except urllib.error.HTTPError as error:
            answer = error
        except OSError as error:
            self._answer(502, {"error": {"message": f"{name} does not answer: {error}"}})
            return
        with answer:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
            self.send_header("X-Kvhub-Model", name)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client left
                while part := answer.read1(1 << 16):
                    self._chunk(part)
                self._chunk(b"")

    def _chunk(self, part: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        self.wfile.flush()

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Silent: the servers log."""


def bind(backends: dict[str, str], host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """A listening proxy that does not serve yet. backends: smallest model first."""
    handler = type("BoundHandler", (Handler,), {"backends": backends})
    server = ThreadingHTTPServer((host, port), handler)
    server.daemon_threads = True
    return server


@contextlib.contextmanager
def serving(backends: dict[str, str]) -> Iterator[str]:
    """A proxy in a thread of this process; yields its address."""
    server = bind(backends)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend", nargs="+", metavar="NAME=URL", help="smallest model first")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    backends = {}
    for each in arguments.backend:
        name, equals, url = each.partition("=")
        if not equals or not url.startswith(("http://", "https://")):
            parser.error(f"{each} is not NAME=URL")
        backends[name] = url.rstrip("/")
    server = bind(backends, arguments.host, arguments.port)
    print(f"http://{arguments.host}:{server.server_port} -> {', '.join(backends)}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
