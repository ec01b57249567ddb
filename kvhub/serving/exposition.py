"""Reading what a server exports for Prometheus: the text format, counters and histograms."""

from __future__ import annotations

import http.client
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvhub.errors import BadInput, NotFound, Unreachable

MAX_BYTES = 16 << 20
_MOST = 1e18
"""No count or time of a server is larger."""
_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? (\S+)(?: -?\d+)?$")
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)",?')

Labels = frozenset[tuple[str, str]]


@dataclass
class Samples:
    """All samples of one scrape by name and labels."""

    values: dict[str, dict[Labels, float]] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples of `name` that have these labels."""
        wanted = frozenset(labels.items())
        return sum(value for found, value in self.values.get(name, {}).items() if wanted <= found)

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of one label."""
        found: dict[str, float] = {}
        for labels, value in self.values.get(name, {}).items():
            key = dict(labels).get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found

    def labels(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Every sample of `name` as its labels and its value."""
        return [(dict(labels), value) for labels, value in self.values.get(name, {}).items()]

    def quantile(self, name: str, share: float, **labels: str) -> float | None:
        """A quantile of a histogram, interpolated as Prometheus does it; None where it is empty."""
        buckets: dict[float, float] = {}
        wanted = frozenset(labels.items())
        for found, value in self.values.get(f"{name}_bucket", {}).items():
            if wanted <= found:
                limit = float(dict(found).get("le", "+Inf"))
                buckets[limit] = buckets.get(limit, 0.0) + value
        limits = sorted(buckets)
        if not limits or buckets[limits[-1]] <= 0:
            return None
        rank, lower, before = share * buckets[limits[-1]], 0.0, 0.0
        for limit in limits:
            if buckets[limit] >= rank:
                if limit == float("inf"):
                    return lower
                width = buckets[limit] - before
                return limit if width <= 0 else lower + (limit - lower) * (rank - before) / width
            lower, before = limit, buckets[limit]
        return lower

    def since(self, earlier: Samples) -> Samples:
        """What was counted in between; after a restart of the server, all of it."""
        later: dict[str, dict[Labels, float]] = {}
        for name, samples in self.values.items():
            old = earlier.values.get(name, {})
            differences = {labels: value - old.get(labels, 0.0) for labels, value in samples.items()}
            later[name] = samples if any(value < 0 for value in differences.values()) else differences
        return Samples(later)


def parse(text: str, prefix: str = "") -> Samples:
    """Samples whose name begins with `prefix`; lines that are none are passed over."""
    samples = Samples()
    for line in text.splitlines():
        if line.startswith("#") or not line.startswith(prefix):
            continue
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        pairs = frozenset((key, _unescape(text)) for key, text in _LABEL.findall(labels or ""))
        known = samples.values.setdefault(name, {})
        known[pairs] = known.get(pairs, 0.0) + value
    return samples


def scrape(url: str, *, timeout: float = 10.0) -> Samples:
    """The `kvhub_` samples of a live server.

    url: of the server, with or without `/metrics`.
    Errors: `BadInput` for what is no http address, `Unreachable` where nothing answers, `NotFound`
    where what answers exports nothing of kvhub.
    """
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
        usable = usable and not re.search(r"[\s\0-\x1f\x7f]", url)
    except ValueError:  # half an IPv6 address, a port that is no number
        usable = False
    if not usable:
        raise BadInput(f"{url} is not the address of a server", "such as http://127.0.0.1:30000")
    base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/metrics')}"
    try:
        request = urllib.request.Request(f"{base}/metrics", headers={"Accept": "text/plain"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read(MAX_BYTES + 1)
            if answer.length and len(text) <= MAX_BYTES:
                raise OSError("the answer broke off")
    except urllib.error.HTTPError as error:
        hint = "start it with: kvhub serve MODEL ... -- --enable-metrics" if error.code == 404 else ""
        raise NotFound(f"{base} exports no metrics (HTTP {error.code})", hint) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise Unreachable(
            f"no answer from {base}: {getattr(reason, 'strerror', None) or reason or type(error).__name__}",
            "is the server running?",
        ) from None
    if len(text) > MAX_BYTES:
        raise BadInput(f"{base}/metrics is larger than {MAX_BYTES >> 20} MiB")
    samples = parse(text.decode(errors="replace"), "kvhub_")
    if not samples.values:
        raise NotFound(
            f"{base} exports no kvhub metrics",
            "it serves without kvhub, or kvhub did not start: its log says why",
        )
    _check(samples, base)
    return samples


def _check(samples: Samples, base: str) -> None:
    for name, found in samples.values.items():
        counted = name.endswith(("_total", "_count", "_bucket"))
        for labels, value in found.items():
            limit = _number(dict(labels).get("le", "+Inf")) if name.endswith("_bucket") else 0.0
            if not abs(value) <= _MOST or (counted and value < 0):
                raise BadInput(f"{base}/metrics: {name} is {value}")
            if not (abs(limit) <= _MOST or limit == math.inf):
                raise BadInput(f"{base}/metrics: {name} has a limit that is no number")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Each count over their sum; nothing where that is zero."""
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items()} if total > 0 else {}


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), text)
