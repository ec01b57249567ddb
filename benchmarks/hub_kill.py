"""Kill fit, push, pull, gc and migrate with -9 at random moments: `python benchmarks/hub_kill.py`.

After each: the registry opens, `verify` passes for everything `ready`, a re-run completes with what a run
that was never disturbed leaves (a pull: ready, with scores, place and evidence), each mapper that is here
has a row (after a lost registry by `kvhub register`), and `gc` leaves nothing that no row names.
Writes benchmarks/results/hub_kill.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "hub_kill.json"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "demo")]
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    """Run it; exit code 1 where a rule was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="pull,push,gc,migrate,fit")
    parser.add_argument("--add", action="store_true", help="to what an earlier run recorded")
    arguments = parser.parse_args()
    from loopback_hub import LoopbackHub
    from support.killing import Killing

    kinds = arguments.kinds.split(",")

    earlier = json.loads(RESULT.read_text()) if arguments.add and RESULT.exists() else {}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, LoopbackHub(Path(name) / "hub").serve() as hub:
        killing = Killing(Path(name), hub, fit="fit" in kinds)
        draw = random.Random(arguments.seed)
        killed = dict.fromkeys(kinds, 0)
        broken: list[str] = []
        for number in range(arguments.kills):
            kind = kinds[number % len(kinds)]
            try:
                killed[kind] += killing.kill(kind, draw)
            except AssertionError as error:
                broken.append(f"{number} {kind}: {error}")
                print(broken[-1], flush=True)
            record(earlier, number + 1, killed, broken, time.perf_counter() - begun)
        killing.close()
    return int(bool(broken))


def record(
    earlier: dict[str, Any], kills: int, killed: dict[str, int], broken: list[str], seconds: float
) -> None:
    """What was found so far: a run that is stopped has its result, too."""
    before = earlier.get("killed_before_the_end", {})
    result = {
        "kills": kills + earlier.get("kills", 0),
        "killed_before_the_end": before | {kind: n + before.get(kind, 0) for kind, n in killed.items()},
        "broken": earlier.get("broken", []) + broken,
        "seconds": round(seconds + earlier.get("seconds", 0.0), 1),
    }
    print(json.dumps(result), flush=True)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
