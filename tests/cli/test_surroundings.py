"""Arguments and addresses that are none: one line with the right exit code, never "a bug in kvhub"."""

from __future__ import annotations

import os

import pytest

from kvhub.errors import BadInput
from kvhub.settings import demand_endpoint

BYTES = os.fsdecode(b"\xff\xfe")


@pytest.mark.parametrize(
    "command",
    [
        "info {}", "pull {}", "pull o/m@{}", "search {}", "list --source {}", "verify {}", "alias {} x", "{}",
        "push {} o/m", "register {}", "rm {}", "fit {} {} --text {}", "plan {} {}", "info --{}",
    ],
)  # fmt: skip
def test_an_argument_that_is_no_text(shell, command: str) -> None:  # type: ignore[no-untyped-def]
    """A lone surrogate, too, which no shell gives and a caller in Python may."""
    for text in (BYTES, "\ud800"):
        said = shell.run(*command.replace("{}", text).split(" "), code=2).stderr
        assert "is not text in UTF-8" in said and "bug" not in said


NONE = ("http://[::", "http://a:99999999", "http://a:b", "http://", "nonsense", "ftp://x", "file:///etc",
        "http://a b", "http://a\x01", "http://\xe9", "http://...", "http://a..b", f"http://{'a' * 64}",
        f"http://{'a.' * 130}b")  # fmt: skip


@pytest.mark.parametrize("address", NONE)
def test_an_address_that_is_none(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(BadInput, match=r"HF_ENDPOINT is .*, which is no address of a Hub"):
        demand_endpoint()


@pytest.mark.parametrize(
    "address",
    ["", "https://hub.example", "https://hub.example.", "http://127.0.0.1:8765/", "http://[::1]:80/x"],
)
def test_an_address(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    demand_endpoint()


def test_a_password_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http//me:secret@hub.example")
    with pytest.raises(BadInput) as refused:
        demand_endpoint()
    assert "secret" not in str(refused.value) and "@hub.example" in str(refused.value)


@pytest.mark.parametrize("command", ["search x", "pull a/b", "push 012345 a/b", "check a/b c/d", "doctor"])
def test_commands_with_an_address_that_is_none(shell, command: str) -> None:  # type: ignore[no-untyped-def]
    """In a process of their own: the client reads it at import."""
    process = shell.start(*command.split(" "), HF_ENDPOINT="http://[::", HF_HUB_OFFLINE="0")
    out, err = process.communicate(timeout=120)
    assert "bug in kvhub" not in err and "Traceback" not in err
    if command == "doctor":
        assert "no address of a Hub" in out
    elif command.startswith("push"):
        assert process.returncode in (2, 3)
    else:
        assert process.returncode == 2 and "no address of a Hub" in err


def test_a_list_needs_no_hub(shell) -> None:  # type: ignore[no-untyped-def]
    shell.run("list", HF_ENDPOINT="http://[::")


def test_what_is_too_long_to_search_for(shell) -> None:  # type: ignore[no-untyped-def]
    for given in (("a" * 501,), ("--target", "a" * 100_000)):
        assert "too long to search for" in shell.run("search", *given, code=2).stderr


def test_options_without_what_they_are_about(shell) -> None:  # type: ignore[no-untyped-def]
    assert "whom" in shell.run("trust", "--remove", code=2).stderr
    assert "--host is empty" in shell.run("ui", "--host", "", code=2).stderr
