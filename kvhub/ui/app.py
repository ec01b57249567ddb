"""The web application: GET only, no scripts, nothing that writes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from kvhub.catalog import explained, files_of, open_registry
from kvhub.cli.listed import of_row, record, stored
from kvhub.cli.output import finite
from kvhub.errors import BadInput, KvhubError, NotFound
from kvhub.hub.search import local
from kvhub.settings import Settings
from kvhub.store.coverage import coverage
from kvhub.store.lost import lost
from kvhub.ui import views
from kvhub.ui.page import STYLE, page
from kvhub_registry import MapperRow, NotRegistered, Registry
from kvhub_registry.errors import Behind

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
LOCAL = ("127.0.0.1", "localhost", "[::1]")


def application(settings: Settings, *, hosts: tuple[str, ...] = LOCAL) -> Starlette:
    """The pages over one registry.

    hosts: names that a browser may use for this server; another name is another site that was made to
    point here (DNS rebinding), and is refused.
    """

    @contextmanager
    def reading() -> Iterator[Registry]:
        known: list[str] = []
        try:
            with explained(), open_registry(settings, read_only=True) as registry:
                try:
                    yield registry
                except NotRegistered:
                    known = [row.digest for row in registry.list()]
                    raise
        except NotFound as error:  # no such mapper, or no registry at all
            if not isinstance(error.__cause__, Behind):
                error.hint = lost(settings, known) or error.hint
            raise

    def rows() -> list[MapperRow]:
        with reading() as registry:
            return registry.list()

    def index(request: Request) -> Response:
        query = request.query_params.get("q", "")[:200]
        every = rows()
        table = coverage(every, family=request.query_params.get("family"))
        missed = lost(settings, (row.digest for row in every))
        return HTMLResponse(views.index(table, local(every, query), query, missed, any_model=bool(every)))

    def mapper(request: Request) -> Response:
        with reading() as registry:
            row = registry.get(request.path_params["ref"])
            history = registry.history(row.digest)
        return HTMLResponse(views.mapper(row, history, settings))

    def asset(request: Request) -> Response:
        with reading() as registry:
            row = registry.get(request.path_params["ref"])
        name = request.path_params["name"]
        if name not in views.pictures(row, settings):
            raise NotFound("no such picture")
        return FileResponse(files_of(row, settings) / "assets" / name, media_type="image/png")

    def listing(request: Request) -> Response:
        here = stored()
        found = local(rows(), request.query_params.get("q", "")[:200])
        return JSONResponse(finite([record(of_row(row), here) for row in found]))

    def style(_request: Request) -> Response:
        return Response(STYLE, media_type="text/css")

    return Starlette(
        routes=[
            Route("/", _threaded(index)),
            Route("/style.css", _threaded(style)),
            Route("/mappers.json", _threaded(listing)),
            Route("/mapper/{ref}", _threaded(mapper)),
            Route("/mapper/{ref}/assets/{name}", _threaded(asset)),
        ],
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=_headers),
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)),
        ],
    )


def _threaded(answer: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
    """Registry and files block, so they are read beside the event loop; errors become a page."""

    async def endpoint(request: Request) -> Response:
        try:
            return await run_in_threadpool(answer, request)
        except KvhubError as error:
            from html import escape

            text = f"<p>{escape(error.message)}</p><p class=note>{escape(error.hint)}</p>"
            status, title = _status(error)
            return HTMLResponse(page(title, text), status)

    return endpoint


def _status(error: KvhubError) -> tuple[int, str]:
    """Of what cannot be shown: HTTP status and the heading of the page."""
    if isinstance(error, NotFound):
        return 404, "Not here"
    return (400, "Which one?") if isinstance(error, BadInput) else (500, "Not now")


async def _headers(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await call_next(request)
    response.headers.update(HEADERS)
    return response
