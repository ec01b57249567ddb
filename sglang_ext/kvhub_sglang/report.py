"""What kvhub did for a request: response metadata and a log line."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from typing import Any

from kvhub.serving.cost import Estimate
from kvhub.strict_json import shown
from kvhub_sglang.metrics import Metrics as Metrics
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
    prefilled: int = field(init=False)
    """All others. Until what is reused is known, all."""
    reason: Code = Code.NOT_ASKED
    detail: str = ""
    source: str = ""
    mapper: str = ""
    hops: int = 0
    draft: bool = False
    """True where a mapper that has not passed the gate was served by override."""
    milliseconds: float = 0.0
    """Spent in kvhub on the scheduler's thread for this request: decide, map and place."""
    staged: float = 0.0
    """Milliseconds a worker spent on look-up, reads and checks."""
    waited: float = 0.0
    """Milliseconds from the request's arrival to its decision."""
    estimate: Estimate | None = None
    """What reuse and computing were expected to take, where that was weighed."""

    def __post_init__(self) -> None:
        self.prefilled = self.prompt - self.exact - self.mapped

    def as_meta(self) -> dict[str, Any]:
        """The form in `meta_info["kvhub"][0]`."""
        return {
            "exact": self.exact,
            "mapped": self.mapped,
            "prefilled": self.prefilled,
            "ms": round(self.milliseconds, 3),
            "staged_ms": round(self.staged, 3),
            "waited_ms": round(self.waited, 3),
            "predicted_ms": self._predicted(),
            "reason": str(self.reason),
            "detail": self.detail,
            "source": self.source,
            "mapper": self.mapper,
            "hops": self.hops,
            "draft": self.draft,
        }

    def _predicted(self) -> list[float] | None:
        found = self.estimate
        if found is None or found.reuse_ms is None or found.compute_ms is None:
            return None
        return [round(found.reuse_ms, 3), round(found.compute_ms, 3)]

    def count(self, *, exact: int, reused: int) -> None:
        """Set the token counts of the prompt: `reused` tokens, `exact` of them exact.

        After a retraction a request also reuses rows of its own answer; they are not prompt.
        """
        reused = min(reused, self.prompt)
        self.exact = min(exact, reused)
        self.mapped = reused - self.exact
        self.prefilled = self.prompt - reused


def log_report(rid: str, report: Report) -> None:
    """One line per request that asked for reuse: `key=value`, or JSON where KVHUB_LOG=json.

    Either way a handler of the logger finds the same fields in the record's `kvhub`.
    """
    fields = {"rid": rid, **report.as_meta()}
    if os.environ.get("KVHUB_LOG") == "json":
        logger.info("kvhub %s", json.dumps(fields), extra={"kvhub": fields})
        return
    logger.info(
        "kvhub rid=%s reason=%s exact=%d mapped=%d prefilled=%d ms=%.1f source=%s mapper=%s hops=%d%s%s",
        shown(rid, 200),  # the client's own
        report.reason,
        report.exact,
        report.mapped,
        report.prefilled,
        report.milliseconds,
        report.source or "-",
        report.mapper[:12] or "-",
        report.hops,
        " DRAFT" if report.draft else "",
        f" ({shown(report.detail, 400)})" if report.detail else "",
        extra={"kvhub": fields},
    )
