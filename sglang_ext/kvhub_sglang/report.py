"""What kvhub did for a request: response metadata, a log line, Prometheus counters."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from kvhub_sglang.refusal import Code

# SGLang shows loggers below its own name in the server log.
logger = logging.getLogger("sglang.srt.kvhub")

META_KEY = "kvhub"


@dataclass
class Report:
    """Counts of prompt tokens by origin; `exact + mapped + prefilled = prompt`."""

    prompt: int = 0
    exact: int = 0
    """Rows this model computed on its own rows."""
    mapped: int = 0
    """Rows that came from a mapper, or were computed on such rows."""
    prefilled: int = 0
    reason: Code = Code.NOT_ASKED
    detail: str = ""
    source: str = ""
    mapper: str = ""
    hops: int = 0
    draft: bool = False
    """True where a mapper that has not passed the gate was served by override."""
    milliseconds: float = 0.0
    """Spent in kvhub for this request: look-up, read, check, map and place."""

    def as_meta(self) -> dict[str, Any]:
        """The form in `meta_info["kvhub"][0]`."""
        return {
            "exact": self.exact,
            "mapped": self.mapped,
            "prefilled": self.prefilled,
            "ms": round(self.milliseconds, 3),
            "reason": str(self.reason),
            "detail": self.detail,
            "source": self.source,
            "mapper": self.mapper,
            "hops": self.hops,
            "draft": self.draft,
        }

    def count(self, *, exact: int, reused: int) -> None:
        """Set the token counts of the prompt: `reused` tokens, `exact` of them exact.

        After a retraction a request also reuses rows of its own answer; they are not prompt.
        """
        reused = min(reused, self.prompt)
        self.exact = min(exact, reused)
        self.mapped = reused - self.exact
        self.prefilled = self.prompt - reused


@dataclass
class Metrics:
    """Prometheus counters of this process, made on first use.

    prometheus_client binds to its multiprocess directory at import, which SGLang
    sets after plugins are loaded; so it is imported late.
    """

    enabled: bool
    _counters: dict[str, Any] = field(default_factory=dict)

    def tokens(self, report: Report) -> None:
        for kind in ("exact", "mapped", "prefilled"):
            self._add("kvhub_tokens", "Prompt tokens by origin", "origin", kind, getattr(report, kind))
        self._add("kvhub_requests", "Requests by outcome", "reason", str(report.reason), 1)
        self._add("kvhub_seconds", "Seconds spent in kvhub", "stage", "handoff", report.milliseconds / 1e3)

    def published(self, blocks: int, seconds: float) -> None:
        self._add("kvhub_published_blocks", "Blocks left in the exchange", "result", "stored", blocks)
        self._add("kvhub_seconds", "Seconds spent in kvhub", "stage", "publish", seconds)

    def error(self, where: str) -> None:
        self._add("kvhub_errors", "Errors caught inside kvhub", "where", where, 1)

    def _add(self, name: str, text: str, label: str, value: str, amount: float) -> None:
        if not self.enabled:
            return
        if name not in self._counters:
            from prometheus_client import Counter

            self._counters[name] = Counter(name, text, [label])
        self._counters[name].labels(value).inc(amount)


def log_report(rid: str, report: Report) -> None:
    """One line per request that asked for reuse."""
    logger.info(
        "kvhub rid=%s reason=%s exact=%d mapped=%d prefilled=%d ms=%.1f source=%s mapper=%s%s%s",
        rid,
        report.reason,
        report.exact,
        report.mapped,
        report.prefilled,
        report.milliseconds,
        report.source or "-",
        report.mapper[:12] or "-",
        " DRAFT" if report.draft else "",
        f" ({report.detail})" if report.detail else "",
    )
