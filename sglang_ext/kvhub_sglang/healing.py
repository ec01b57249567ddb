"""When idle, compute what was mapped, so that exact rows are found at the next turn and errors do not add up.

In steps of a bounded number of tokens, each a request of its own, so that a client never
waits for more than one step. Rows of others are not evicted for it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvhub_sglang.internal import Internal
from kvhub_sglang.metrics import Metrics

REMEMBERED = 64
IN_USE_SECONDS = 600.0
"""A conversation that was not continued for this long is left as it is."""


@dataclass
class Span:
    """A conversation that lives on mapped rows. tenant: the client's salt and extra key."""

    tokens: array[int]
    salt: str | None
    extra_key: str | None
    used: float
    steps: int = 0

    def continues(self, other: Span) -> bool:
        """Whether all of `other` is the beginning of this one."""
        count = len(other.tokens)
        same = (self.salt, self.extra_key) == (other.salt, other.extra_key)
        return same and self.tokens[:count] == other.tokens


class Healer:
    """The conversations to heal, the last used first.

    match: `(tokens, salt, extra_key) -> tokens` on the device in the exact namespace.
    room: tokens that can be allocated without evicting anything.
    """

    def __init__(
        self,
        metrics: Metrics,
        match: Callable[[Sequence[int], str | None, str | None], int],
        room: Callable[[], int],
        *,
        step: int,
        page_size: int,
    ) -> None:
        self._metrics, self._match, self._room = metrics, match, room
        self._step, self._page = step, page_size
        self._spans: list[Span] = []

    @property
    def wanted(self) -> bool:
        """Whether a conversation waits."""
        return bool(self._spans)

    def used(self, tokens: Sequence[int], salt: str | None, extra_key: str | None) -> None:
        """A request on mapped rows finished with these tokens, its answer included."""
        whole = array("q", tokens[: len(tokens) - len(tokens) % self._page])
        if not whole:
            return
        span = Span(whole, salt, extra_key, time.monotonic())
        # the turns before are part of this one; others may begin alike, with one system prompt
        self._spans = [other for other in self._spans if not span.continues(other)][1 - REMEMBERED :]
        self._spans.append(span)

    def next(self) -> Internal | None:
        """The next step, if there is one."""
        while self._spans:
            span = self._spans[-1]
            if time.monotonic() - span.used > IN_USE_SECONDS:
                self._spans.pop()
                self._metrics.healed("gone")
                continue
            held = self._match(span.tokens, span.salt, span.extra_key)
            if held >= len(span.tokens):
                self._spans.pop()
                self._metrics.healed("done")
                continue
            stop = min(len(span.tokens), held - held % self._page + self._step)
            stop -= stop % self._page
            # a step that was made and left nothing behind is not made again for ever
            span.steps += 1
            if stop <= held or self._room() < stop - held or span.steps > 2 + len(span.tokens) // self._step:
                self._spans.pop()
                self._metrics.healed("no_room")
                continue
            return Internal("heal", span.tokens[:stop], span.salt, span.extra_key, done=self._timed())
        return None

    def _timed(self) -> Callable[[Any], None]:
        started = time.monotonic()

        def done(req: Any) -> None:
            if req is None:
                self._metrics.healed("preempted")
            self._metrics.stage("heal", time.monotonic() - started)

        return done
