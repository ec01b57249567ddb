"""Prometheus metrics of one server process.

prometheus_client binds to its multiprocess directory at import, which SGLang sets after
plugins are loaded; so it is imported on first use. No label holds a tenant, a salt or a
request id: they are unbounded, and some are secret. `CATALOG` names everything that is
exported, and the dashboard and `kvhub top` are tested against it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from kvhub_sglang.report import Report

Kind = Literal["counter", "histogram", "gauge"]

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_KL = (1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.2, 0.5, 1, 2, 5)

STAGES = ("wait", "read", "map", "publish", "heal", "shadow", "handoff")
"""wait: a request held back for staging. read: blocks looked up, read, checked, off the scheduler's thread.
map: allocation, copies, mapping, writing, on it. handoff: all of kvhub on it, for one request."""


@dataclass(frozen=True)
class Metric:
    """One family as Prometheus sees it; a counter's samples end in `_total`."""

    kind: Kind
    text: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()


CATALOG: dict[str, Metric] = {
    "kvhub_info": Metric(
        "gauge", "1; labels say what is served", ("version", "model", "identity", "reuse", "max_hops")
    ),
    "kvhub_on": Metric("gauge", "1 while kvhub works in this process, 0 where it is off", ()),
    "kvhub_mapper": Metric(
        "gauge", "1 while a mapper is in use, 0 after it was withdrawn", ("mapper", "source", "draft")
    ),
    "kvhub_tokens": Metric("counter", "Prompt tokens by origin", ("origin",)),
    "kvhub_requests": Metric(
        "counter", "Requests by outcome: mapped, exact, or the reason for neither", ("reason",)
    ),
    "kvhub_stage_seconds": Metric("histogram", "Seconds by stage", ("stage",), _SECONDS),
    "kvhub_lookups": Metric("counter", "Blocks looked for in the exchange", ("result",)),
    "kvhub_blocks": Metric("counter", "Blocks moved from and to the exchange", ("direction",)),
    "kvhub_bytes": Metric("counter", "Bytes moved from and to the exchange", ("direction",)),
    "kvhub_errors": Metric("counter", "Errors caught inside kvhub", ("where",)),
    "kvhub_healed": Metric("counter", "Lossy spans recomputed while idle", ("result",)),
    "kvhub_shadow_kl": Metric(
        "histogram", "KL of the mapped next-token distribution from the native one, in nats", ("mapper",), _KL
    ),
    "kvhub_shadow_top1": Metric(
        "counter", "Shadow comparisons by whether the first tokens agree", ("mapper", "agree")
    ),
    "kvhub_withdrawn": Metric("counter", "Mappers withdrawn while serving", ("mapper", "cause")),
}


@dataclass
class Metrics:
    """Counts what this process does; every method is cheap and does nothing where metrics are off."""

    enabled: bool
    _made: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # ---- the process

    def serving(
        self,
        *,
        version: str,
        model: str,
        identity: str,
        reuse: str,
        max_hops: int,
        mappers: list[tuple[str, str, bool]],
    ) -> None:
        """At start. mappers: (digest, source name, draft) of each one in use."""
        labels = (version, model, identity[:12], reuse, str(max_hops))
        self._set("kvhub_info", labels, 1)
        self._set("kvhub_on", (), 1)
        for digest, source, draft in mappers:
            self._set("kvhub_mapper", (digest[:12], source, "yes" if draft else "no"), 1)

    def off(self) -> None:
        """kvhub switched itself off in this process."""
        self._set("kvhub_on", (), 0)

    def withdrawn(self, digest: str, source: str, draft: bool, cause: str) -> None:
        """A mapper is used no more. cause: one word (`shadow`, `retired`, ...)."""
        self._set("kvhub_mapper", (digest[:12], source, "yes" if draft else "no"), 0)
        self._add("kvhub_withdrawn", (digest[:12], cause))

    def error(self, where: str) -> None:
        """An error that was caught. where: the name of the place."""
        self._add("kvhub_errors", (where,))

    # ---- requests

    def request(self, report: Report) -> None:
        """Once per request, at its release."""
        for origin in ("exact", "mapped", "prefilled"):
            self._add("kvhub_tokens", (origin,), getattr(report, origin))
        self._add("kvhub_requests", (str(report.reason),))
        self.stage("handoff", report.milliseconds / 1e3)

    def stage(self, stage: str, seconds: float) -> None:
        """Time spent in one of `STAGES`."""
        if self.enabled:
            self._get("kvhub_stage_seconds").labels(stage).observe(seconds)

    # ---- the exchange

    def lookups(self, hits: int, misses: int) -> None:
        """Blocks that a decision found usable, and those at which its search ended."""
        self._add("kvhub_lookups", ("hit",), hits)
        self._add("kvhub_lookups", ("miss",), misses)

    def read(self, blocks: int, nbytes: int) -> None:
        """Blocks read and checked."""
        self._add("kvhub_blocks", ("read",), blocks)
        self._add("kvhub_bytes", ("read",), nbytes)

    def published(self, blocks: int, seconds: float, nbytes: int = 0) -> None:
        """Blocks left in the exchange by one finished request."""
        self._add("kvhub_blocks", ("written",), blocks)
        self._add("kvhub_bytes", ("written",), nbytes)
        self.stage("publish", seconds)

    def dropped(self, blocks: int) -> None:
        """Blocks that were not published because the publisher was behind."""
        self._add("kvhub_blocks", ("dropped",), blocks)

    # ---- healing and shadow

    def healed(self, result: str) -> None:
        """One healing attempt. result: `done`, `gone`, `preempted`, ..."""
        self._add("kvhub_healed", (result,))

    def shadow(self, digest: str, kl: float, agree: bool) -> None:
        """One shadow comparison of a mapper; kl in nats."""
        if self.enabled:
            self._get("kvhub_shadow_kl").labels(digest[:12]).observe(kl)
        self._add("kvhub_shadow_top1", (digest[:12], "yes" if agree else "no"))

    # ---- prometheus

    def _add(self, name: str, labels: tuple[str, ...], amount: float = 1) -> None:
        if self.enabled:
            self._get(name).labels(*labels).inc(amount)

    def _set(self, name: str, labels: tuple[str, ...], value: float) -> None:
        if self.enabled:
            made = self._get(name)
            (made.labels(*labels) if labels else made).set(value)

    def _get(self, name: str) -> Any:
        found = self._made.get(name)
        return found if found is not None else self._make(name)

    def _make(self, name: str) -> Any:
        """Make a metric on its first use; worker threads count too, and a name exists only once."""
        with self._lock:
            if name in self._made:
                return self._made[name]
            import prometheus_client

            metric = CATALOG[name]
            if metric.kind == "histogram":
                made: Any = prometheus_client.Histogram(
                    name, metric.text, metric.labels, buckets=metric.buckets
                )
            elif metric.kind == "gauge":
                # live*: a value of a process that died is not shown any more
                made = prometheus_client.Gauge(
                    name, metric.text, metric.labels, multiprocess_mode="livemostrecent"
                )
            else:
                made = prometheus_client.Counter(name, metric.text, metric.labels)
            self._made[name] = made
            return made
