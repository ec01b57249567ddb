"""Errors of the real client in our words, and when it asks again."""

from __future__ import annotations

import errno
import socket

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from loopback_hub import LoopbackHub
from starlette.responses import PlainTextResponse

from kvhub.errors import AccessDenied, KvhubError, Unreachable
from kvhub.hub.client import ATTEMPTS, LONGEST_WAIT, api, ask, explain


def test_a_hub_that_does_not_listen_is_tried_a_few_times() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        dead = HfApi(endpoint=f"http://127.0.0.1:{probe.getsockname()[1]}")
    waits: list[float] = []
    with pytest.raises(Unreachable, match="cannot reach"):
        ask("o/m", lambda: dead.model_info("o/m"), sleep=waits.append)
    assert len(waits) == ATTEMPTS - 1
    assert sum(waits) < 10


@pytest.mark.parametrize(("header", "expected"), [("0", [0.0] * 3), ("7", [7.0] * 3), ("86400", [])])
def test_retry_after_is_honoured_up_to_a_bound(hub: LoopbackHub, header: str, expected: list[float]) -> None:
    hub.faults.append(lambda _: PlainTextResponse("no", 429, headers={"Retry-After": header}))
    waits: list[float] = []
    with pytest.raises(Unreachable, match="429"):
        ask("o/m", lambda: api().model_info("o/m"), sleep=waits.append)
    assert waits == expected
    assert LONGEST_WAIT < 86400


@pytest.mark.parametrize("status", [400, 402, 405, 413, 422])
def test_other_refusals_are_final(hub: LoopbackHub, status: int) -> None:
    hub.faults.append(lambda _: PlainTextResponse("no", status))
    with pytest.raises(KvhubError, match=str(status)):
        ask("o/m", lambda: api().model_info("o/m"), sleep=lambda _: pytest.fail("waited"))


def test_reasons_below_the_clients_own_wrapping_are_found() -> None:
    wrapped = LocalEntryNotFoundError("look at your connection")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert "disk is full" in explain(wrapped, "o/m").message
    assert isinstance(explain(LocalEntryNotFoundError("x"), "o/m"), KvhubError)
    assert "HF_HUB_OFFLINE" in explain(OfflineModeIsEnabled("off"), "o/m").hint
    assert "HF_HUB_DISABLE_XET" in explain(ConnectionError("/xet-write-token/main"), "o/m").hint
    assert isinstance(explain(PermissionError(errno.EACCES, "no", "/x"), "o/m"), AccessDenied)
    assert "\n" not in explain(RuntimeError("one\ntwo"), "o/m").message


def test_our_own_errors_pass_through() -> None:
    def fail() -> None:
        raise AccessDenied("ours")

    with pytest.raises(AccessDenied, match="ours"):
        ask("o/m", fail, sleep=lambda _: pytest.fail("waited"))
