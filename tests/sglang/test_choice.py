"""What a request asks for, where several ask: the strictest holds."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
import support.pools  # noqa: F401 - SGLang without a GPU
from sglang.srt.managers.io_struct import KvHintsEnvelope
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams

from kvhub_sglang.choice import ACTION, Choice, choose, silent
from kvhub_sglang.refusal import Code, Refusal
from kvhub_sglang.settings import ServingSettings


def chosen(
    *payloads: Any, client: Any = None, version: str = "1", protocol: str = "1", **settings: Any
) -> Choice:
    """What `choose` says to hints with these payloads; the last has `version`."""
    params = SamplingParams(max_new_tokens=1, custom_params={"kvhub": client} if client else None)
    req = Req("r", "", array("q", [1]), params)
    actions = [
        {"action_id": str(number), "action_type": ACTION, "action_version": "1", "payload": payload}
        for number, payload in enumerate(payloads)
    ]
    actions[-1]["action_version"] = version
    actions.insert(1, {**actions[0], "action_type": "other", "payload": {"reuse": False}})
    envelope = {"protocol_version": protocol, "message_id": "m", "actions": actions}
    req.kv_hints = msgspec.convert(envelope, KvHintsEnvelope)
    return choose(req, ServingSettings(**{"exchange": "/x", "max_hops": 8, **settings}))


YES = {"reuse": True}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ({"max_hops": 3}, {"max_hops": 2}, Choice(None, 2)),
        ({"max_hops": 3}, {}, Choice(None, 3)),
        ({"sources": ["A", "b"]}, {"sources": ["a", "c"]}, Choice(frozenset({"a"}), 8)),
        ({"sources": ["a"]}, {"sources": ["b"]}, Choice(frozenset(), 8)),
        ({"sources": ["a"]}, {}, Choice(frozenset({"a"}), 8)),
        ({"worth": "always"}, {"worth": "auto"}, Choice(None, 8, "auto")),
        ({"worth": "always"}, {}, Choice(None, 8, "always")),
    ],
)
def test_of_several_hints_the_strictest_holds(
    one: dict[str, Any], two: dict[str, Any], expected: Choice, turned: bool
) -> None:
    hints = [{**YES, **one}, {**YES, **two}]
    assert chosen(*(reversed(hints) if turned else hints)) == expected


@pytest.mark.parametrize("second", [{"reuse": False}, {"reuse": True, "max_hops": 0}, {}])
def test_one_hint_that_declines_or_cannot_be_read_is_enough(second: Any) -> None:
    for hints in ([YES, second], [second, YES]):
        with pytest.raises(Refusal) as refused:
            chosen(*hints)
        assert refused.value.code is Code.DECLINED


def test_a_second_hint_of_an_unknown_version_declines() -> None:
    with pytest.raises(Refusal, match="unknown version"):
        chosen(YES, YES, version="2")


def test_hints_of_an_unknown_protocol_decline() -> None:
    with pytest.raises(Refusal, match="unknown version"):
        chosen(YES, protocol="99")


def test_a_client_narrows_what_hints_left() -> None:
    assert chosen(
        {**YES, "worth": "always", "sources": ["a", "b"]},
        {**YES, "max_hops": 4},
        client={**YES, "worth": "auto", "sources": ["b"], "max_hops": 6},
    ) == Choice(frozenset({"b"}), 4, "auto")


@pytest.mark.parametrize("policy", ["asked", "hinted", "always", "off"])
@pytest.mark.parametrize("client", [None, {"reuse": True}, {"reuse": False}, {}, "nonsense", 0])
@pytest.mark.parametrize("action", [None, ACTION, "other"])
def test_silent_is_what_would_not_be_asked(policy: Any, client: Any, action: str | None) -> None:
    """Whoever says anything, and be it nonsense, is heard by `choose`."""
    req = Req("r", "", array("q", [1]), SamplingParams(max_new_tokens=1, custom_params={"kvhub": client}))
    if action is not None:
        one = {"action_id": "1", "action_type": action, "action_version": "1", "payload": YES}
        envelope = {"protocol_version": "1", "message_id": "m", "actions": [one]}
        req.kv_hints = msgspec.convert(envelope, KvHintsEnvelope)
    settings = ServingSettings(exchange="/x", reuse=policy)
    heard = client is not None or action == ACTION
    assert silent(req, settings) is (policy in ("asked", "hinted") and not heard)
    if silent(req, settings):
        with pytest.raises(Refusal) as refused:
            choose(req, settings)
        assert refused.value.code is Code.NOT_ASKED
