"""The memory of this process and of the machine, and the refusal of what cannot fit."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress
from pathlib import Path

from kvhub.errors import BadInput

RUNTIME = 650_000_000
"""Bytes of Python, torch, transformers and a tokenizer (0.6 to 0.7 GB), where the system does not tell."""
_LARGE = 4 << 20
_M_MMAP_THRESHOLD = -3


def demand_memory(needed: int, *, hint: str, available: int | None = None) -> None:
    """Refuse (`BadInput`) before any forward is run what cannot fit.

    available: bytes; None asks the operating system (and says nothing where it does not know).
    """
    have = free_memory() if available is None else available
    if have is not None and needed > have:
        raise BadInput(
            f"this fit needs {needed / 1e9:.1f} GB and {have / 1e9:.1f} GB may be used"
            " (moments: 16 * F_s * (F_s + F_t) bytes, F = layers * kv_heads * head_dim)",
            hint,
        )


def held() -> int:
    """Bytes of memory that this process has now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return RUNTIME


def return_freed() -> None:
    """From now on glibc gives large blocks back to the system as they are freed.

    Left alone it learns to keep blocks of up to 32 MB, between which a fit's larger ones find no room: the
    same fit then holds a tenth more, and how much depends on the order of its allocations.
    """
    with suppress(OSError, AttributeError):  # another C library has no such call
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)


def release() -> None:
    """Give back to the system what was freed: glibc keeps it, and the next stage would come on top of it."""
    gc.collect()
    with suppress(OSError, AttributeError):
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
