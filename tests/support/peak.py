"""Peak memory of a whole fit, and what the fit said of it before it started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_RUN = """
import pathlib, re, sys
from kvhub.cli import main
try:
    main()
finally:
    # not getrusage: its maximum begins with what the process that started this one held
    status = pathlib.Path("/proc/self/status").read_text()
    print("peak", int(re.search(r"VmHWM:\\s+([0-9]+) kB", status)[1]) * 1024, file=sys.stderr)
"""


class Peak(NamedTuple):
    """Gigabytes of 1e9 bytes."""

    bound: float
    stage: str
    used: float


def peak_of_fit(arguments: Sequence[str], home: Path, *, cwd: Path | None = None) -> Peak:
    """Run `kvhub fit`, one thread, in a process of its own. `RuntimeError` with its words where it fails."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, "fit", *arguments],
        env={**os.environ, "KVHUB_HOME": str(home), "OMP_NUM_THREADS": "1"},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    said = re.search(r"memory: ([0-9.]+) GB at the peak, while it ([a-z ]+) \(", done.stderr)
    used = re.search(r"^peak ([0-9]+)$", done.stderr, re.M)
    if done.returncode or said is None or used is None:
        raise RuntimeError(done.stderr)
    return Peak(float(said[1]), said[2], int(used[1]) / 1e9)
