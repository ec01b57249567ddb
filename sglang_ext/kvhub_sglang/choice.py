"""What one request asks for.

On `/generate`, by a trusted orchestrator:

    "kv_hints": {"protocol_version": "1", "message_id": "m1", "actions": [
        {"action_id": "a1", "action_type": "kvhub.reuse", "action_version": "1",
         "payload": {"reuse": true, "sources": ["<name or digest>"], "max_hops": 1}}]}

Of several actions of this type all hold. On the OpenAI endpoints:
`"custom_params": {"kvhub": {"reuse": true}}`. Both may only narrow what the server's
settings allow; where both are present, both must agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvhub_sglang.refusal import Code, Refusal
from kvhub_sglang.settings import ServingSettings

ACTION = "kvhub.reuse"


class Ask(BaseModel):
    """The payload of a hint, or of `custom_params.kvhub`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    reuse: bool
    sources: list[str] | None = Field(default=None, max_length=64)
    """Names or identity digests of source models to consider; None: all that are allowed."""
    max_hops: int | None = Field(default=None, ge=1, le=8)
    turn: int | None = Field(default=None, ge=1, le=1_000_000)
    """Which turn of its conversation this is; a client's own word can only make it a later one."""
    worth: Literal["auto", "always"] | None = None
    """Whether to weigh mapping against computing. Only kv_hints may set aside a server's `auto`."""


@dataclass(frozen=True)
class Choice:
    """What is allowed for this request after server and client were heard."""

    sources: frozenset[str] | None
    max_hops: int
    worth: Literal["auto", "always"] = "auto"
    turn: int | None = None
    """None: nobody who is trusted said so."""


def silent(req: Any, settings: ServingSettings) -> bool:
    """Whether nobody said anything of reuse, so that `choose` would say `NOT_ASKED`; in microseconds."""
    return settings.reuse not in ("always", "off") and not spoken(req)


def spoken(req: Any) -> bool:
    """Whether a hint or the client says anything of reuse, whatever it is."""
    return bool(_actions(req)) or _said(req) is not None


def choose(req: Any, settings: ServingSettings) -> Choice:
    """The strictest of settings, hints and client; `Refusal` where reuse is off.

    req: SGLang's `Req`; reads `kv_hints` and `sampling_params.custom_params`.
    """
    if settings.reuse == "off":
        raise Refusal(Code.DECLINED, "reuse is off on this server")
    hints, client = _hints(req), _client(req)
    asks = hints if client is None else [*hints, client]
    if any(not ask.reuse for ask in asks):
        raise Refusal(Code.DECLINED, "the request declines reuse")
    asked = bool(hints) or (client is not None and settings.reuse != "hinted")
    if settings.reuse != "always" and not asked:
        raise Refusal(Code.NOT_ASKED, "the request did not ask for reuse")
    sources: frozenset[str] | None = None
    max_hops = settings.max_hops
    for ask in asks:
        if ask.sources is not None:
            wanted = frozenset(name.casefold() for name in ask.sources)
            sources = wanted if sources is None else sources & wanted
        if ask.max_hops is not None:
            max_hops = min(max_hops, ask.max_hops)
    worth = settings.worth
    if any(hint.worth == "always" for hint in hints):
        worth = "always"
    if any(ask.worth == "auto" for ask in asks):
        worth = "auto"
    trusted = any(hint.turn is not None for hint in hints)
    turn = max((ask.turn for ask in asks if ask.turn is not None), default=None) if trusted else None
    return Choice(sources, max_hops, worth, turn)


def _hints(req: Any) -> list[Ask]:
    """Every action of type `kvhub.reuse`, so that none can be hidden behind another."""
    asks = []
    for action in _actions(req):
        versions = req.kv_hints.protocol_version, action.action_version
        if versions != ("1", "1"):
            raise Refusal(Code.DECLINED, f"unknown version of kv_hints or {ACTION}: {versions}")
        asks.append(_parse(action.payload))
    return asks


def _actions(req: Any) -> list[Any]:
    envelope = getattr(req, "kv_hints", None)
    return [one for one in getattr(envelope, "actions", None) or () if one.action_type == ACTION]


def _client(req: Any) -> Ask | None:
    said = _said(req)
    return None if said is None else _parse(said)


def _said(req: Any) -> Any:
    params = getattr(req.sampling_params, "custom_params", None)
    return params.get("kvhub") if isinstance(params, dict) else None


def _parse(payload: object) -> Ask:
    try:
        return Ask.model_validate(payload)
    except ValidationError as error:
        raise Refusal(Code.DECLINED, f"bad reuse request: {error.errors()[0]['msg']}") from None
