"""The proxy of the router demo, and what of a history survives a chat template."""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from demo.router import proxy
from demo.router.agent import SCRIPT, turns, upto
from demo.router.survival import TEMPLATES, renderer, summary, survival

MODELS = ["small", "large"]


def encode(text: str) -> list[int]:
    """Bytes as tokens: prefixes of text are prefixes of tokens, so shares are those of the text."""
    return list(text.encode())


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def test_a_template_that_drops_nothing_keeps_all_of_the_history() -> None:
    found = survival(template("chatml"), encode, thinking=False)
    assert len(found) == len(turns()) - 1 >= 6
    assert all(turn.common == turn.held for turn in found)
    assert all(turn.prompt > turn.held for turn in found)


def test_dropped_thinking_ends_the_prefix_at_the_next_user_message_alone() -> None:
    found = survival(template("chatml_thinking"), encode)
    chains = [turn for turn in found if turn.after == "tool"]
    users = [turn for turn in found if turn.after == "user"]
    assert len(chains) >= 4 and len(users) >= 2
    assert all(turn.common == turn.held for turn in chains)
    assert all(turn.common < 0.8 * turn.held for turn in users)
    # the prefix ends where the first thinking since the last user message was
    index = next(i for i in turns() if SCRIPT[i + 1]["role"] == "user")
    before = renderer(template("chatml_thinking"))(upto(turns()[0]), True)
    assert users[0].common == len(encode(before)) + len("<t") and index > turns()[0]  # <think>, <tool_call>


def test_kept_thinking_survives_and_switched_off_thinking_loses_the_last_answer() -> None:
    text = template("chatml_thinking")
    assert all(turn.common == turn.held for turn in survival(text, encode, keep_thinking=True))
    off = survival(text, encode, thinking=False, enable_thinking=False)
    for index, turn in zip(turns(), off, strict=False):  # the empty thinking in the prompt is in no history
        messages = [{**m, "reasoning_content": ""} for m in upto(index)]
        assert 0 <= turn.common - len(encode(renderer(text)(messages, True))) <= len("<t")


def test_thinking_that_the_client_does_not_send_back_is_lost_with_the_answer_behind_it() -> None:
    found = survival(template("chatml_thinking"), encode, returned=False)
    assert all(turn.common < turn.held for turn in found)
    assert (
        summary(found)["survives"] < summary(survival(template("chatml"), encode, thinking=False))["survives"]
    )


def test_a_date_in_the_system_message_loses_everything_a_day_later() -> None:
    today = renderer(template("headers"), date_string="01 Jan 2030")(upto(4), True)
    later = renderer(template("headers"), date_string="02 Jan 2030")(upto(4), True)
    assert today != later and today[:80] != later[:80]
    found = summary(survival(template("headers"), encode, thinking=False, date_string="01 Jan 2030"))
    assert found["survives"] == 1.0


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_templates_hold_every_message(path: Path) -> None:
    text = renderer(path.read_text())(upto(len(SCRIPT)), True)
    for message in SCRIPT:
        if message["role"] in ("user", "tool"):
            assert message["content"].strip() in text
        for call in message.get("tool_calls", []):
            assert call["function"]["name"] in text


@pytest.mark.parametrize(
    ("body", "model"),
    [
        ({"model": "small", "messages": [{"role": "user"}]}, "small"),
        ({"model": "auto", "messages": [{"role": "user"}]}, "large"),
        ({"model": "auto", "messages": [{"role": "user"}, {"role": "tool"}]}, "small"),
        ({"messages": []}, "large"),
        ({"model": 7, "messages": "x"}, "large"),
        ({"model": "nobody", "messages": [None]}, "large"),
    ],
)
def test_the_choice_of_a_model(body: dict[str, Any], model: str) -> None:
    assert proxy.choose(body, MODELS) == model


def test_a_client_that_says_something_of_reuse_is_believed() -> None:
    ask = {"kvhub": {"reuse": True}}
    assert proxy.with_reuse({})["custom_params"] == ask
    assert proxy.with_reuse({"custom_params": {"a": 1}})["custom_params"] == {"a": 1, **ask}
    for said in ({"kvhub": {"reuse": False}}, {"kvhub": None}, [], "x"):
        assert proxy.with_reuse({"custom_params": said})["custom_params"] == said


class Backend(BaseHTTPRequestHandler):
    """Answers with what it was asked; in three parts where a stream is wanted."""

    seen: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append({**body, "path": self.path, "token": self.headers.get("Authorization")})
        self.send_response(400 if body.get("bad") else 200)
        self.send_header("Content-Type", "text/event-stream" if body.get("stream") else "application/json")
        self.end_headers()
        for part in range(3):
            self.wfile.write(f"data: {part}\n\n".encode())
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def backend() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    seen: list[dict[str, Any]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Backend,), {"seen": seen}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with proxy.serving(
        {"small": f"http://127.0.0.1:{server.server_port}", "large": "http://127.0.0.1:1"}
    ) as url:
        yield url, seen
    server.shutdown()
    server.server_close()


def post(url: str, body: bytes) -> tuple[int, str]:
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Authorization": "Bearer x"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_every_field_of_a_request_passes_and_the_answer_comes_back(
    backend: tuple[str, list[dict[str, Any]]],
) -> None:
    url, seen = backend
    fields = {"cache_salt": "t", "extra_key": "k", "return_meta_info": True, "unheard_of": [1]}
    body = {"model": "small", "stream": True, "messages": [], **fields}
    assert post(url, json.dumps(body).encode()) == (200, "data: 0\n\ndata: 1\n\ndata: 2\n\n")
    assert seen == [
        {
            **body,
            "custom_params": {"kvhub": {"reuse": True}},
            "path": "/v1/chat/completions",
            "token": "Bearer x",
        }
    ]


def test_errors_are_answers(backend: tuple[str, list[dict[str, Any]]]) -> None:
    url, _ = backend
    assert post(url, b'{"model": "small", "bad": true}')[0] == 400
    status, text = post(url, b'{"model": "large"}')
    assert status == 502 and "large does not answer" in text
    for broken in (b"", b"[]", b"{", b"\xff"):
        assert post(url, broken)[0] == 400
    with urllib.request.urlopen(f"{url}/v1/models", timeout=20) as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == ["small", "large", "auto"]
