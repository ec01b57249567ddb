"""Of some mapped requests, compare the next token's distribution with a native prefill's, when idle.

Which ones is a function of their tokens, so every rank and every replay samples the same.
A mapper that is shown to agree less often than the gate asks for is withdrawn.
"""

from __future__ import annotations

import hashlib
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvhub.evaluation.gate import Gate
from kvhub_sglang.internal import Internal
from kvhub_sglang.metrics import Metrics

TOP = 20
"""Candidates of the next token that are compared."""
LEAST = 32
"""Comparisons before a mapper can be withdrawn."""
WINDOW = 200
WAITING = 16


@dataclass
class _Sample:
    tokens: array[int]
    salt: str | None
    lossy_salt: str | None
    extra_key: str | None
    mapper: str


class Shadow:
    """Samples that wait for an idle server, and what was found for each mapper.

    withdraw: called with the digest of a mapper that left its gate.
    """

    def __init__(self, metrics: Metrics, rate: float, withdraw: Callable[[str], None]) -> None:
        self._metrics, self._rate, self._withdraw = metrics, rate, withdraw
        self._waiting: deque[_Sample] = deque(maxlen=WAITING)
        self._agreed: dict[str, deque[bool]] = {}
        self._second: deque[Internal] = deque()

    @property
    def wanted(self) -> bool:
        """Whether a sample waits."""
        return bool(self._waiting or self._second)

    def sampled(self, tokens: Sequence[int]) -> bool:
        """Whether a prompt belongs to the sample."""
        digest = hashlib.sha256(array("q", tokens).tobytes()).digest()
        return int.from_bytes(digest[:8], "big") < self._rate * 2**64

    def consider(
        self,
        tokens: Sequence[int],
        salt: str | None,
        lossy_salt: str | None,
        extra_key: str | None,
        mapper: str,
    ) -> None:
        """A mapped request finished; mapper: the digest of the one that gave its rows."""
        if mapper and self.sampled(tokens):
            self._waiting.append(_Sample(array("q", tokens), salt, lossy_salt, extra_key, mapper))

    def next(self) -> Internal | None:
        """The next request, if a sample waits: on its mapped rows first, they may be evicted soon."""
        if self._second:
            return self._second.popleft()
        if not self._waiting:
            return None
        sample = self._waiting.popleft()
        started = time.monotonic()

        def native(mapped: dict[int, float]) -> Internal:
            def done(req: Any) -> None:
                found = next_token(req)
                if found:
                    self.compared(sample.mapper, found, mapped)
                self._metrics.stage("shadow", time.monotonic() - started)

            return Internal("shadow", sample.tokens, sample.salt, sample.extra_key, done=done, top=TOP)

        def done(req: Any) -> None:
            found = next_token(req)
            if found and req.cached_tokens >= len(sample.tokens) // 2:  # else its rows are gone already
                self._second.append(native(found))

        return Internal(
            "shadow", sample.tokens, sample.lossy_salt, sample.extra_key, done=done, insert=False, top=TOP
        )

    def compared(self, mapper: str, native: dict[int, float], mapped: dict[int, float]) -> None:
        """Count one comparison of log-probabilities by token; withdraw where the gate is left."""
        agree = max(native, key=native.__getitem__) == max(mapped, key=mapped.__getitem__)
        self._metrics.shadow(mapper, divergence(native, mapped), agree)
        seen = self._agreed.setdefault(mapper, deque(maxlen=WINDOW))
        seen.append(agree)
        if len(seen) >= LEAST and upper_bound(sum(seen), len(seen)) < Gate().min_top1:
            seen.clear()
            self._withdraw(mapper)


def next_token(req: Any) -> dict[int, float]:
    """Log-probability of the likeliest tokens after the prompt; nothing where there are none."""
    logprob = getattr(req, "logprob", None)
    values = getattr(logprob, "output_top_logprobs_val", None)
    tokens = getattr(logprob, "output_top_logprobs_idx", None)
    if not values or not tokens:
        return {}
    return {int(t): float(v) for t, v in zip(tokens[0], values[0], strict=True) if math.isfinite(v)}


def divergence(native: dict[int, float], mapped: dict[int, float]) -> float:
    """KL(native || mapped) in nats over the native candidates, and the rest as one more.

    A token that is not among the mapped candidates has at most the least of them: the
    value is then a lower bound.
    """
    least = min(mapped.values())
    total, rest_native, rest_mapped = 0.0, 1.0, 1.0
    for token, p in native.items():
        q = mapped.get(token, least)
        total += math.exp(p) * (p - q)
        rest_native -= math.exp(p)
        rest_mapped -= math.exp(q)
    if rest_native > 1e-6 and rest_mapped > 1e-6:
        total += rest_native * math.log(rest_native / rest_mapped)
    return max(0.0, total)


def upper_bound(agreed: int, n: int) -> float:
    """Wilson's upper bound of a share, 97.5 % one-sided."""
    z, share = 1.96, agreed / n
    middle = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return (middle + spread) / (1 + z * z / n)
