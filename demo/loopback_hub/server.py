"""The loopback Hub as a server: log, faults, and one uvicorn thread."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .api import Api
from .store import TOKEN, HubError, Store

Fault = Callable[[Request], Response | None]


class LoopbackHub:
    """A Hub of one's own.

    faults: asked for every request first; the first answer that is not None is sent instead.
    log: (method, path, whether a token came with it, status) of every request.
    """

    def __init__(self, root: Path) -> None:
        self.store = Store(root)
        self.api = Api(self.store)
        self.faults: list[Fault] = []
        self.log: list[tuple[str, str, bool, int]] = []
        self.url = ""

    @property
    def environment(self) -> dict[str, str]:
        """What a client process needs to use this Hub and nothing else."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    @contextmanager
    def serve(self, port: int = 0) -> Iterator[LoopbackHub]:
        """Listen on the loopback (port 0: any free one) until the block ends."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        bound = listener.getsockname()[1]
        self.url = self.api.url = f"http://127.0.0.1:{bound}"
        # Another host name is another origin: the client then sends no token to the blobs.
        self.api.blob_url = f"http://localhost:{bound}"
        server = uvicorn.Server(uvicorn.Config(self._app(), log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the loopback hub did not start")
            time.sleep(0.005)
        try:
            yield self
        finally:
            server.should_exit = True
            thread.join(5)
            listener.close()

    def _app(self) -> Starlette:
        return Starlette(
            routes=self.api.routes(),
            middleware=[Middleware(BaseHTTPMiddleware, dispatch=self._dispatch)],
            exception_handlers={HubError: _answer},
        )

    async def _dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = next(
            (answer for fault in list(self.faults) if (answer := fault(request)) is not None), None
        )
        if response is None:
            response = await call_next(request)
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        self.log.append((request.method, path, "authorization" in request.headers, response.status_code))
        return response


async def _answer(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HubError)
    headers = {**error.headers, "X-Error-Message": error.message, "X-Request-Id": uuid.uuid4().hex}
    if error.code:
        headers["X-Error-Code"] = error.code
    return JSONResponse({"error": error.message}, error.status, headers=headers)
