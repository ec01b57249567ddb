"""A small file system that can be full: a tmpfs, where this may be mounted."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A new directory `place` of `size` (`1m`); skips the test without the right to mount."""
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("may not mount here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@contextmanager
def filled(disk: Path, leave: int = 0) -> Iterator[None]:
    """While this lasts the disk has `leave` bytes."""
    found = os.statvfs(disk)
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, found.f_bavail * found.f_frsize - leave)))
    try:
        yield
    finally:
        filler.unlink()
