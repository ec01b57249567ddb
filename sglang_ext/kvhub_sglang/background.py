"""What a server asks of itself: prefixes that requests wait for; idle, timing, shadows and healing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from kvhub_sglang.healing import Healer
from kvhub_sglang.internal import Internal, InternalRequests
from kvhub_sglang.plan import Plan
from kvhub_sglang.report import logger
from kvhub_sglang.serving import Serving
from kvhub_sglang.shadow import Shadow

_LENGTHS = (64, 64, 128, 256, 512)
"""Prefills to time at start; the first warms up and is not counted."""
_LONG_MS = 1000.0
"""A client may have to wait for one of them: none is begun after one took longer."""


class Background:
    """Between the cache and its `InternalRequests`. Outlives a switch-off, for what is on its way."""

    def __init__(
        self,
        serving: Serving,
        internal: InternalRequests,
        match: Callable[[Sequence[int], str | None, str | None], int],
        room: Callable[[], int],
        withdraw: Callable[[str], None],
    ) -> None:
        settings = serving.settings
        self._serving, self._room = serving, room
        self.internal = internal
        self.healer = Healer(
            serving.metrics, match, room, step=settings.heal_tokens, page_size=serving.page_size
        )
        self.shadow = Shadow(serving.metrics, settings.shadow, withdraw)
        known = serving.cost.prefill_ms(1, 0) is not None
        weighs = settings.worth == "auto" and bool(serving.candidates)
        self._lengths = list(_LENGTHS) if weighs and not known else []

    def finished(self, req: Any, plan: Plan) -> None:
        """A client's request ended on mapped rows."""
        settings = self._serving.settings
        tokens = list(req.origin_input_ids) + list(req.output_ids)
        if settings.heal:
            self.healer.used(tokens[:-1], plan.original_salt, req.extra_key)
        if settings.shadow and not plan.dead:
            self.shadow.consider(
                list(req.origin_input_ids), plan.original_salt, plan.salt, req.extra_key, plan.report.mapper
            )

    def take(self, is_idle: Callable[[], bool]) -> list[Internal]:
        """Requests to send now; one of the idle kind only where nothing at all is pending."""
        if self.wanted and not self.internal.pending and is_idle():
            request = self.next()
            if request is not None:
                self.internal.want(request)
        return self.internal.take()

    def keep(self, reqs: list[Any]) -> list[Any]:
        """Answers that go to clients; ours end here."""
        if not self.internal.sent:
            return reqs
        for req in reqs:
            if req.finished() and self.internal.get(req.rid) is not None:
                self.internal.finished(req.rid, req)
        return [req for req in reqs if not self.internal.is_ours(req.rid)]

    @property
    def wanted(self) -> bool:
        """Whether anything is to be done when idle."""
        return bool(self._lengths) or self.shadow.wanted or self.healer.wanted

    def next(self) -> Internal | None:
        """One request, or None."""
        if self._lengths:
            return self._timed(self._lengths.pop(0))
        return self.shadow.next() or self.healer.next()

    def _timed(self, length: int) -> Internal | None:
        if self._room() < 2 * length:
            return None
        counted = len(self._lengths) < len(_LENGTHS) - 1
        # any tokens do; these are in every vocabulary
        tokens = random.Random(length).choices(range(3, 90), k=length)

        def done(req: Any) -> None:
            if req is None:
                return
            times = req.time_stats
            milliseconds = (times.prefill_finished_time - times.forward_entry_time) * 1e3
            if counted:
                self._serving.cost.observe_prefill(length, 0, milliseconds)
            if milliseconds > _LONG_MS:
                self._lengths.clear()
            if not self._lengths:
                logger.info("kvhub timed prefill: %s", self._serving.cost.terms().get("prefill"))

        return Internal("timing", tokens, "kvhub-timing", None, done=done, insert=False)
