"""What a fit will hold in memory, by formula, and the refusal of what cannot fit."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvhub.errors import BadInput
from kvhub.fit.calibration import TAIL, TUNING
from kvhub.fit.distill.correction import RANK
from kvhub.fit.distill.schedule import SAMPLE, Distill
from kvhub.fit.moments import PairMoments
from kvhub.fit.settings import FitSettings
from kvhub.model.identity import Geometry

RUNTIME = 600_000_000
"""Bytes of Python, torch, transformers and a tokenizer (measured: 0.5 to 0.6 GB)."""
RESERVE = 1.02


@dataclass(frozen=True)
class Budget:
    """Bytes at the peak, by what holds them."""

    models: int
    """Weights that are in memory at one time."""
    moments: int
    """Float64 sums and products of all layers, K and V: 16 * F_s * (F_s + F_t), both: + 16 * F_t**2."""
    window: int
    """One window's forwards, captures and the rows of one block."""
    solve: int
    """Three copies of the largest Gram, and the mappers themselves."""
    runtime: int = RUNTIME

    @property
    def total(self) -> int:
        """Windows and solving come one after the other, the rest is there all the time."""
        return int(RESERVE * (self.runtime + self.models + self.moments + max(self.window, self.solve)))

    def __str__(self) -> str:
        parts = (("models", self.models), ("moments", self.moments))
        shown = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in parts)
        rest = self.total - self.models - self.moments
        return f"{self.total / 1e9:.1f} GB at the peak ({shown}, the rest {rest / 1e9:.1f})"


def moment_bytes(source: Geometry, target: Geometry, *, both: bool) -> int:
    """Float64 moments of K and of V over all layers."""
    wide, other = source.num_layers * source.features, target.num_layers * target.features
    return 16 * (wide * (wide + other) + (other * other if both else other) + wide + other)


def budget(
    source: Geometry,
    target: Geometry,
    settings: FitSettings,
    *,
    both: bool,
    weights: tuple[int, int] = (0, 0),
    hidden: int = 0,
    vocabulary: int = 0,
    low_memory: bool = False,
) -> Budget:
    """The peak of a fit. weights: bytes of each model; hidden: floats a token of one layer's forward;
    vocabulary: of the target, whose logits are held where k or lambda is chosen.

    low_memory: one model at a time, and none while the moments are there.
    """
    wide, other = source.num_layers * source.features, target.num_layers * target.features
    per_token = wide + other
    # A block in float64, K and V, and one of them joined; a window's captures in float32 and its own dtype.
    rows = 3 * 8 * PairMoments.BLOCK * per_token
    window = rows + settings.longest * (12 * per_token + 4 * hidden)
    solve, stored = 0, 2 if settings.store_dtype == "bfloat16" else 4
    for one, two in ((source, target), (target, source))[: 1 + both]:
        width = settings.features(one)
        solve = max(solve, 3 * 8 * width * width) + stored * 2 * two.num_layers * two.features * width
    if isinstance(settings.train, Distill):
        shapes = ((source, target), (target, source))[: 1 + both]
        solve = max(solve, *(_distilling(*pair, settings, hidden, vocabulary) for pair in shapes))
    if settings.automatic:
        solve += 4 * vocabulary * TAIL * (TUNING + 8)
    models = max(weights) if low_memory else sum(weights)
    moments = moment_bytes(source, target, both=both)
    if low_memory:
        return Budget(max(0, models - moments), moments, window, solve)
    return Budget(models, moments, window, solve)


def _distilling(source: Geometry, target: Geometry, settings: FitSettings, hidden: int, vocab: int) -> int:
    """Float32: every map and its directions, four copies of what is trained, one tail through the target."""
    assert isinstance(settings.train, Distill)
    width, out = settings.features(source), target.features
    maps = 2 * target.num_layers * (width * (out + RANK) + 5 * RANK * out)
    sample = 2 * SAMPLE * (source.num_layers * source.features + target.num_layers * out)
    tail = min(settings.train.tail, settings.longest // 4) * (target.num_layers * hidden + 6 * vocab)
    return 4 * (maps + sample + tail + 2 * settings.longest * target.num_layers * out)


def memory_needed(source: Geometry, target: Geometry, *, k: int, both: bool) -> int:
    """Bytes of float64 that a fit holds at its peak beside the models: moments, and rows or solves."""
    found = budget(source, target, FitSettings(k=k), both=both)
    return found.moments + max(found.window, found.solve)


def demand_memory(needed: int, *, hint: str, available: int | None = None) -> None:
    """Refuse (`BadInput`) before any forward is run what cannot fit.

    available: bytes; None asks the operating system (and says nothing where it does not know).
    """
    have = free_memory() if available is None else available
    if have is not None and needed > have:
        raise BadInput(
            f"this fit needs {needed / 1e9:.1f} GB and {have / 1e9:.1f} GB are free"
            " (moments: 16 * F_s * (F_s + F_t) bytes, F = layers * kv_heads * head_dim)",
            hint,
        )


def release() -> None:
    """Give back to the system what was freed: glibc keeps it, and the next stage would come on top of it."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library has no such call
        ctypes.CDLL(None).malloc_trim(0)


def free_memory() -> int | None:
    """Bytes that can be had without swapping, by the system and by this process's control group."""
    found = [value for value in (_system(), _group()) if value is not None]
    return min(found) if found else None


def _system() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _group() -> int | None:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        used = int((root / "memory.current").read_text())
        return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
