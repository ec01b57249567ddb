"""`kvhub ui`: the registry in a browser."""

from __future__ import annotations

import click

from kvhub.cli import output
from kvhub.errors import AccessDenied, BadInput, KvhubError


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8420, show_default=True, help="0: any free one."
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Host name by which browsers reach it; needed with --host other than the loopback. Repeatable.",
)
def command(host: str, port: int, hosts: tuple[str, ...]) -> None:
    """Show matrix, search and mappers as read-only web pages, until Ctrl-C.

    There is no login: whoever reaches the port sees what kvhub list shows. Needs
    pip install "kvhub[ui]".
    """
    import socket

    if not host:
        raise BadInput("--host is empty", "--host 0.0.0.0 listens on every address")
    from kvhub.settings import Settings

    settings = Settings.load()  # refuses a home that can be none, before an address is printed
    try:
        import uvicorn

        from kvhub.ui.app import LOCAL, application
    except ImportError:
        raise KvhubError("the page needs starlette and uvicorn", 'pip install "kvhub[ui]"') from None
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        )
    except OSError as error:
        raise AccessDenied(
            f"cannot listen on {host}:{port}: {error.strerror}", "--port takes another"
        ) from None
    bound = listener.getsockname()[1]
    click.echo(f"http://{f'[{host}]' if ':' in host else host}:{bound}")
    if not hosts and host not in ("127.0.0.1", "::1", "localhost"):
        output.note("only requests for a loopback name are answered; --allow-host NAME adds one")
    app = application(settings, hosts=(*LOCAL, *hosts))
    with listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", server_header=False))
        server.run(sockets=[listener])
