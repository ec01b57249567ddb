"""Kill -9 a fit at random moments, start it again, and compare its digests with those of a fit in one piece.

    python -m benchmarks.fit_kill SOURCE TARGET --text FILE [--kills 10] [options of kvhub fit]

Every attempt is a process of its own that is killed at a moment drawn over the time a whole fit takes, until
as many were killed as asked for. Writes `benchmarks/results/fit_kill.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import describe, write


def run(command: list[str], home: Path, after: float | None = None) -> tuple[bool, float, str]:
    """(killed, seconds, stderr); after: seconds until kill -9, None lets it end."""
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**os.environ, "KVHUB_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _, err = process.communicate(timeout=after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate()
    if process.returncode not in (0, -signal.SIGKILL):
        sys.exit(err.decode())
    return process.returncode != 0, time.monotonic() - began, err.decode()


def digests(home: Path) -> list[str]:
    """Of all mappers, sorted."""
    return sorted(path.name for path in (home / "mappers").iterdir() if not path.name.startswith("."))


def created(home: Path) -> str:
    """When the fit says that it began."""
    manifest = next((home / "mappers").glob("*/manifest.json"))
    return str(json.loads(manifest.read_bytes())["created"])


def in_one_piece(command: list[str], root: Path, begun: str, whole: float) -> list[str]:
    """Digests of the same fit without a kill, told to have begun when the killed one did."""
    keep = root / "progress"
    state = keep / "state.json"
    after = 0.2 * whole
    while not state.exists():
        run([*command, "--checkpoint", str(keep)], root / "probe", after)
        after *= 1.5
    content = json.loads(state.read_bytes()) | {"created": begun, "windows": 0, "file": None}
    state.write_text(json.dumps(content))
    run([*command, "--checkpoint", str(keep)], root / "home")
    return digests(root / "home")


def main() -> None:
    """Kill, resume, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--text", required=True)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given, more = parser.parse_known_args()
    chosen = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        command = [sys.executable, "-m", "kvhub.cli", "fit", given.source, given.target, "--text", given.text]
        command += [*(option for option in more if option != "--"), "--checkpoint-every", "2"]
        _, whole, _ = run(command, root / "calm")  # how long it takes
        kills: list[dict[str, Any]] = []
        fits: list[dict[str, Any]] = []
        while len(kills) < given.kills:
            home, progress = root / f"killed{len(fits)}", root / f"progress{len(fits)}"
            resumed = [*command, "--checkpoint", str(progress)]
            killed, before = True, len(kills)
            while killed:
                # Once there were kills enough the last fit may end.
                after = chosen.uniform(0.05, 0.97) * whole if len(kills) < given.kills else None
                killed, seconds, _ = run(resumed, home, after)
                if killed:
                    state = progress / "state.json"
                    windows = json.loads(state.read_bytes())["windows"] if state.exists() else 0
                    kills.append({"fit": len(fits), "after_s": round(seconds, 2), "windows": windows})
                    print(kills[-1], flush=True)
            expected = in_one_piece(command, root / f"whole{len(fits)}", created(home), whole)
            fits.append({"kills": len(kills) - before, "digests": digests(home), "expected": expected})
        result = {
            "kills": kills,
            "fits": fits,
            "equal": all(fit["digests"] == fit["expected"] for fit in fits),
            "machine": describe(),
        }
    print(write("fit_kill", result).read_text())
    if not result["equal"]:
        sys.exit("the digests differ")


if __name__ == "__main__":
    main()
