"""Peak memory of a whole fit, and what the fit said of it before it started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
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
    done = _start(arguments, home, cwd)
    _, words = done.communicate()
    said = re.search(r"memory: ([0-9.]+) GB at the peak, while it ([a-z ]+) \(", words)
    used = re.search(r"^peak ([0-9]+)$", words, re.M)
    if done.returncode or said is None or used is None:
        raise RuntimeError(words)
    return Peak(float(said[1]), said[2], int(used[1]) / 1e9)


def peak_of_resumed(arguments: Sequence[str], home: Path, *, cwd: Path | None = None) -> Peak:
    """`peak_of_fit` of the second start of a fit that was killed after its first checkpoint.

    `RuntimeError` where it ended before that, or did not go on from there.
    """
    progress = home / "progress"
    given = [*arguments, "--checkpoint", str(progress)]
    first = _start([*given, "--checkpoint-every", "2"], home, cwd)
    while first.poll() is None and not list(progress.glob("moments-*")):
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    _, words = first.communicate()
    if first.returncode != -signal.SIGKILL or not list(progress.glob("moments-*")):
        raise RuntimeError(words)
    return peak_of_fit(given, home, cwd=cwd)


def _start(arguments: Sequence[str], home: Path, cwd: Path | None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _RUN, "fit", *arguments],
        env={**os.environ, "KVHUB_HOME": str(home), "OMP_NUM_THREADS": "1"},
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
