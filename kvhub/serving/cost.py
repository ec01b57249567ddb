"""What reuse and computing cost on this server, learnt from its own traffic.

Three lines, in milliseconds: prefilling n tokens after c others (`a + b n + d n (c + n/2)`,
the last term attention), mapping m tokens with one mapper (`a + b m`), and looking up,
reading and checking blocks (`a + b blocks`). Each is a least-squares fit of relative
errors in which old observations fade, so it follows the load. Nothing is decided on a
line that was not measured: then a request is computed.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhub.errors import KvhubError
from kvhub.strict_json import parse_object, read_bounded

_FADE = 0.98
"""Weight that an observation keeps when the next one comes: about the last 50 count."""
_FURTHER = 4.0
"""A prefill longer than this times the longest one seen is taken to cost no more than that."""
_LEAST = 3
_LEAST_TOKENS = 64
_MAX_BYTES = 1 << 20
MARGIN = 1.05
"""Reuse must be expected to be faster by this factor."""


class Line:
    """A weighted least-squares fit with coefficients that are never negative.

    terms: how many; an observation is its values of the terms, and milliseconds.
    """

    def __init__(self, terms: int) -> None:
        self.terms = terms
        self.count = 0
        self.longest = 0.0
        self._gram = [[0.0] * terms for _ in range(terms)]
        self._moment = [0.0] * terms

    def observe(self, values: Sequence[float], milliseconds: float) -> None:
        """One measurement. values[1] is the length, by which extrapolation is bounded."""
        if not (math.isfinite(milliseconds) and milliseconds >= 0):
            return
        weight = 1.0 / max(milliseconds, 0.1) ** 2
        for i in range(self.terms):
            self._moment[i] = self._moment[i] * _FADE + weight * values[i] * milliseconds
            for j in range(self.terms):
                self._gram[i][j] = self._gram[i][j] * _FADE + weight * values[i] * values[j]
        self.count += 1
        self.longest = max(self.longest, values[1])

    def coefficients(self) -> list[float]:
        """The fit; a term that would be negative is left out."""
        kept = list(range(self.terms))
        while kept:
            found = _solve([[self._gram[i][j] for j in kept] for i in kept], [self._moment[i] for i in kept])
            if min(found) >= 0:
                fit = [0.0] * self.terms
                for term, value in zip(kept, found, strict=True):
                    fit[term] = value
                return fit
            kept.remove(kept[found.index(min(found))])
        return [0.0] * self.terms

    def at(self, values: Sequence[float]) -> float:
        """Milliseconds at these values."""
        return sum(c * v for c, v in zip(self.coefficients(), values, strict=True))

    def state(self) -> dict[str, Any]:
        """For a file; `restored` reads it."""
        return {"count": self.count, "longest": self.longest, "gram": self._gram, "moment": self._moment}

    @classmethod
    def restored(cls, terms: int, state: Mapping[str, Any]) -> Line:
        """From `state`; `ValueError` where it is none."""
        line = cls(terms)
        gram, moment = state["gram"], state["moment"]
        numbers = [*moment, state["longest"], *(x for row in gram for x in row)]
        if len(gram) != terms or len(moment) != terms or any(len(row) != terms for row in gram):
            raise ValueError("another number of terms")
        if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers):
            raise ValueError("not finite")
        line.count, line.longest = int(state["count"]), float(state["longest"])
        line._gram = [[float(x) for x in row] for row in gram]
        line._moment = [float(x) for x in moment]
        return line


@dataclass(frozen=True)
class Estimate:
    """What one request would cost both ways, and what follows."""

    worth: bool
    compute_ms: float | None
    """Prefill of all that the device does not hold; None where it was never measured."""
    reuse_ms: float | None
    """Staging, mapping, and prefill of the rest."""
    reason: str


class CostModel:
    """The three lines of one server. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prefill = Line(3)
        self._stage = Line(2)
        self._maps: dict[str, Line] = {}

    # ---- observations

    def observe_prefill(self, tokens: int, context: float, milliseconds: float) -> None:
        """`tokens` computed in one batch, after `context` others on average."""
        if tokens > 0 and milliseconds > 0:
            with self._lock:
                self._prefill.observe(_prefill_terms(tokens, context), milliseconds)

    def observe_map(self, mapper: str, tokens: int, milliseconds: float) -> None:
        """`tokens` mapped and placed by the mapper of that digest."""
        if tokens > 0:
            with self._lock:
                self._maps.setdefault(mapper, Line(2)).observe((1.0, float(tokens)), milliseconds)

    def observe_stage(self, blocks: int, milliseconds: float) -> None:
        """`blocks` looked up, read and checked for one request."""
        with self._lock:
            self._stage.observe((1.0, float(blocks)), milliseconds)

    # ---- predictions

    def prefill_ms(self, tokens: int, context: float) -> float | None:
        """Expected prefill; None where too little was measured."""
        with self._lock:
            line = self._prefill
            if line.count < _LEAST or line.longest < _LEAST_TOKENS:
                return None
            return line.at(_prefill_terms(min(tokens, _FURTHER * line.longest), context))

    def map_ms(self, mapper: str, tokens: int) -> float | None:
        """Expected time to map and place; None where it was never measured."""
        with self._lock:
            line = self._maps.get(mapper)
            return None if line is None or not line.count else line.at((1.0, float(tokens)))

    def stage_ms(self, blocks: int) -> float:
        """Expected look-up and reading; nothing where it was never measured (the wait is bounded)."""
        with self._lock:
            return self._stage.at((1.0, float(blocks))) if self._stage.count and blocks else 0.0

    def judge(
        self, *, prompt: int, held: int, reach: int, mapped: Mapping[str, int], blocks: int
    ) -> Estimate:
        """Whether to stage `blocks` and map, so that `reach` tokens need no computing.

        held: tokens that are reused either way. mapped: tokens by mapper digest.
        """
        compute = self.prefill_ms(prompt - held, held)
        rest = self.prefill_ms(prompt - reach, reach)
        if compute is None or rest is None:
            return Estimate(False, None, None, "prefill was not measured yet")
        reuse = self.stage_ms(blocks) + rest
        for mapper, tokens in mapped.items():
            cost = self.map_ms(mapper, tokens)
            if cost is None:
                return Estimate(False, compute, None, f"mapper {mapper[:12]} was not measured yet")
            reuse += cost
        worth = reuse * MARGIN < compute
        return Estimate(worth, compute, reuse, f"reuse {reuse:.1f} ms, computing {compute:.1f} ms")

    def terms(self) -> dict[str, dict[str, float]]:
        """Coefficients by quantity and term, for metrics and `kvhub explain`."""
        with self._lock:
            found = {}
            if self._prefill.count >= _LEAST and self._prefill.longest >= _LEAST_TOKENS:
                a, b, d = self._prefill.coefficients()
                found["prefill"] = {"request": a, "token": b, "pair": d, "longest": self._prefill.longest}
            if self._stage.count:
                a, b = self._stage.coefficients()
                found["stage"] = {"request": a, "block": b}
            for mapper, line in self._maps.items():
                a, b = line.coefficients()
                found[f"map:{mapper[:12]}"] = {"request": a, "token": b}
            return found

    # ---- a small file, so that a restart need not learn anew

    def save(self, path: Path) -> None:
        """Write atomically. Errors: `OSError`."""
        with self._lock:
            lines = {"prefill": self._prefill.state(), "stage": self._stage.state()}
            lines["maps"] = {mapper: line.state() for mapper, line in self._maps.items()}
            text = json.dumps({"version": 1, **lines})
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """From a file; an empty model where there is none, or none that can be read."""
        model = cls()
        try:
            data = parse_object(read_bounded(path, limit=_MAX_BYTES, follow_symlinks=True), "costs")
            prefill, stage = Line.restored(3, data["prefill"]), Line.restored(2, data["stage"])
            maps = {str(name): Line.restored(2, state) for name, state in data["maps"].items()}
        except (KvhubError, OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return model
        model._prefill, model._stage, model._maps = prefill, stage, maps
        return model


def _prefill_terms(tokens: float, context: float) -> tuple[float, float, float]:
    # in thousands of pairs, so that the three columns are of one size
    return (1.0, float(tokens), tokens * (context + tokens / 2) / 1e3)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a small symmetric system, with a ridge that decides what was never varied."""
    size = len(right)
    ridge = [1e-9 * max(matrix[i][i], 1e-12) for i in range(size)]
    rows = [
        [matrix[i][j] + (ridge[i] if i == j else 0.0) for j in range(size)] + [right[i]] for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(size):
            if r != i and rows[i][i]:
                factor = rows[r][i] / rows[i][i]
                rows[r] = [x - factor * y for x, y in zip(rows[r], rows[i], strict=True)]
    return [rows[i][size] / rows[i][i] if rows[i][i] else 0.0 for i in range(size)]
