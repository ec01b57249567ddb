"""Kill -9 a fit at random moments, start it again, and compare its digests with those of a fit in one piece.

    python -m benchmarks.fit_kill SOURCE TARGET --text FILE [--kills 10] [options of kvhub fit]

Every attempt is a process of its own, killed at a moment drawn over the time a whole fit takes, until as many
were killed as asked for. Needs PYTHONPATH=tests. Writes `benchmarks/results/fit_kill.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from support.fitting import fork

from benchmarks.machine import describe, write
from kvhub.fit.checkpoint import sealed


def run(arguments: list[str], home: Path, after: float | None = None) -> tuple[bool, float, str]:
    """(killed, seconds, what it said); after: seconds until kill -9, None lets it end.

    A child of this process, which has loaded torch already: the moments are those of the fit itself.
    """
    home.mkdir(parents=True, exist_ok=True)
    log = home / "log"
    began = time.monotonic()
    pid = fork(arguments, home, log)
    done, status = 0, 0
    while not done:
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done and after is not None and time.monotonic() - began >= after:
            os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0)
        time.sleep(0.001)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        sys.exit(log.read_text())
    return os.WIFSIGNALED(status), time.monotonic() - began, log.read_text()


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
    state.write_bytes(sealed(content))
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
    torch.set_num_threads(1)
    assert transformers.AutoModelForCausalLM  # loaded before the children are made
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        command = ["fit", given.source, given.target, "--text", given.text]
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
                after = chosen.uniform(0.02, 0.6) * whole if len(kills) < given.kills else None
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
