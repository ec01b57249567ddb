"""Clients of the soak: conversations that switch servers at random, in every way a request can ask."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.servers import Server, hints

TENANTS: tuple[str | None, ...] = (None, "tenant-a", "tenant-b", "tenant-c")
FORGED = ("kvhub:", f"kvhub:{'0' * 32}:{'0' * 32}:0:", "kvhub:x:1:0:")
STOP = threading.Event()
"""Set to begin no more requests, here and in later parts."""
CONTEXT = 900
"""Tokens after which a conversation ends."""


@dataclass(frozen=True)
class Said:
    """One answer as it came back."""

    server: str
    mode: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    finished: str
    """SGLang's finish reason, or what the HTTP error said."""
    ours: bool
    """The client itself aborted it."""
    report: dict[str, Any] | None

    @property
    def mapped(self) -> bool:
        """Whether lossy rows lay under the answer; without a report nothing is known to be exact."""
        return self.report is None or self.report["mapped"] > 0


@dataclass
class Traffic:
    """Runs `count` requests from `clients` threads and keeps every answer."""

    servers: dict[str, Server]
    documents: list[list[int]]
    count: int
    clients: int
    seed: int
    seconds: float = float("inf")
    """No request begins later than this."""
    answers: list[Said] = field(default_factory=list)
    went: Counter[str] = field(default_factory=Counter)
    may_go: threading.Event = field(default_factory=threading.Event)
    """Cleared while somebody needs the servers idle (a flush)."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = 0
        self._until = time.monotonic() + self.seconds
        self.may_go.set()

    def done(self) -> int:
        return len(self.answers)

    def run(self) -> None:
        threads = [threading.Thread(target=self._client, args=(n,)) for n in range(self.clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _take(self) -> bool:
        self.may_go.wait(30)
        with self._lock:
            self._taken += 1
            return self._taken <= self.count and time.monotonic() < self._until and not STOP.is_set()

    def _client(self, number: int) -> None:
        choose = random.Random(self.seed * 1000 + number)
        while True:
            tenant = choose.choice(TENANTS)
            document = choose.choice(self.documents)
            history = document[: choose.randrange(70, 300)]
            for turn in range(choose.randrange(2, 7)):
                if not self._take():
                    return
                start = choose.randrange(300, 450)
                prompt = (
                    history if turn == 0 else [*history, *document[start : start + choose.randrange(10, 150)]]
                )
                if len(prompt) > CONTEXT:
                    break
                history = [*prompt, *self._turn(choose, tenant, prompt)]

    def _turn(self, choose: random.Random, tenant: str | None, prompt: list[int]) -> list[int]:
        name = choose.choice(sorted(self.servers))
        mode, fields = _mode(choose)
        if tenant is not None:
            fields.setdefault("cache_salt", tenant)
        sampling = {"temperature": 0, "max_new_tokens": choose.choice([1, 2, 6, 12, 24]), "ignore_eos": True}
        sampling.update(fields.pop("sampling_params", {}))
        body = {"input_ids": prompt, "sampling_params": sampling, **fields}
        draw = choose.random()
        if draw < 0.06:
            kind, said = "aborted", self._aborted(choose, name, body)
        elif draw < 0.12:
            kind, said = "disconnected", self._disconnected(choose, name, body)
        elif draw < 0.18:
            sampling["n"] = choose.choice([2, 3])
            kind, said = "parallel", _post(self.servers[name], body)
        elif draw < 0.45:
            kind, said = "streamed", _stream(self.servers[name], body)
        else:
            if draw < 0.55:
                body |= {"return_logprob": True, "top_logprobs_num": 2}
            kind, said = "plain", _post(self.servers[name], body)
        ours = kind in ("aborted", "disconnected")
        found = [_said(name, mode, prompt, one, ours) for one in said]
        with self._lock:
            self.went[f"{mode}/{kind}"] += 1
            self.answers += found
        return list(found[0].answer)

    def _aborted(self, choose: random.Random, name: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Asked for more tokens than anybody waits for, and aborted by its id after a moment."""
        rid = f"soak-{choose.random()}"
        body["rid"] = rid
        body["sampling_params"]["max_new_tokens"] = 120
        said: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: said.extend(_post(self.servers[name], body)))
        thread.start()
        time.sleep(choose.uniform(0, 0.3))
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self.servers[name].post("/abort_request", {"rid": rid})
        thread.join()
        return said

    def _disconnected(self, choose: random.Random, name: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """A streaming client that goes away after a few tokens."""
        body["sampling_params"]["max_new_tokens"] = 120
        return _stream(self.servers[name], body, leave_after=choose.randrange(1, 6))


def _mode(choose: random.Random) -> tuple[str, dict[str, Any]]:
    """How a request asks for reuse, or not; the fields that say so."""
    modes: list[tuple[str, Callable[[], dict[str, Any]], int]] = [
        ("silent", dict, 5),
        ("hint", lambda: {"kv_hints": hints(max_hops=choose.choice([1, 2]))}, 14),
        ("client", lambda: {"sampling_params": {"custom_params": {"kvhub": {"reuse": True}}}}, 4),
        ("declined", lambda: {"kv_hints": hints(False)}, 2),
        (
            "client_declines",
            lambda: {
                "kv_hints": hints(),
                "sampling_params": {"custom_params": {"kvhub": {"reuse": False}}},
            },
            1,
        ),
        ("unknown_source", lambda: {"kv_hints": hints(sources=["nobody"])}, 1),
        ("bad_ask", lambda: {"kv_hints": hints(max_hops=99)}, 1),
        ("forged", lambda: {"kv_hints": hints(), "cache_salt": choose.choice(FORGED)}, 1),
    ]
    name, fields, _ = choose.choices(modes, [weight for *_, weight in modes])[0]
    return name, fields()


def _post(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        answer = server.post("/generate", body, timeout=300)
    except (OSError, RuntimeError, ValueError) as error:
        return [{"error": str(error)}]
    return answer if isinstance(answer, list) else [answer]


def _stream(server: Server, body: dict[str, Any], leave_after: int | None = None) -> list[dict[str, Any]]:
    """The last event of a stream, which holds all tokens so far and the final report."""
    request = urllib.request.Request(
        f"{server.url}/generate",
        json.dumps({**body, "stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    last: dict[str, Any] = {"error": "an empty stream"}
    try:
        with urllib.request.urlopen(request, timeout=300) as stream:
            events = 0
            for line in stream:
                if line.startswith(b"data: {"):
                    last, events = json.loads(line[6:]), events + 1
                    if events == leave_after:
                        break
    except urllib.error.HTTPError as error:
        last = {"error": f"{error.code}: {error.read().decode(errors='replace')}"}
    except (OSError, ValueError) as error:
        last = {"error": str(error)}
    return [last]


def _said(name: str, mode: str, prompt: list[int], answer: dict[str, Any], ours: bool) -> Said:
    if "meta_info" not in answer:
        error = answer.get("error", answer)
        return Said(name, mode, tuple(prompt), (), f"error: {error}", ours, None)
    meta = answer["meta_info"]
    reason = meta.get("finish_reason")
    reports = [one for one in meta.get("kvhub") or [] if one]
    return Said(
        name,
        mode,
        tuple(prompt),
        tuple(answer.get("output_ids", ())),
        str(reason["type"]) if reason else "unfinished",
        ours,
        reports[-1] if reports else None,
    )
