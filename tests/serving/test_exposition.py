"""Answers of a server that are not what kvhub exports."""

from __future__ import annotations

import socket
import threading

import pytest

from kvhub.cli import run

HEAD = b"HTTP/1.1 200 OK\r\n"


def answer(body: bytes) -> str:
    """The address of something that says `body` once."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as client:
            client.recv(4096)
            client.sendall(body)

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        *((HEAD + b"\r\nkvhub_tokens_total " + v + b"\n", 2) for v in (b"NaN", b"+Inf", b"1e400", b"-1")),
        (HEAD + b'\r\nkvhub_stage_seconds_bucket{le="abc"} 1\n', 2),
        (b"SSH-2.0-x\r\n", 5),
        (HEAD + b"Content-Length: 1000\r\n\r\nkvhub_on 1\n", 5),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\nff\r\nkvhub_on 1\n", 5),
    ],
)
def test_it_is_refused_in_a_line(body: bytes, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", answer(body), "--once"]) == code
    assert len(capsys.readouterr().err.splitlines()) <= 2


def test_an_address_with_a_space(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["top", "http://a b"]) == 2


def test_what_a_server_says_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    said = b'kvhub_info{identity="\x1b[31m",reuse="\x1b[2J",max_hops="\x1b"} 1\n'
    said += b'kvhub_bytes_total{direction="\x1b"} 1\n'
    assert run(["top", answer(HEAD + b"\r\n" + said), "--once"]) == 0
    assert "\x1b" not in capsys.readouterr().out
