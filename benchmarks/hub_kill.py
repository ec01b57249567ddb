"""Kill fit, push, pull, gc, migrate and create with -9 at random moments: `python benchmarks/hub_kill.py`.

migrate upgrades a registry with mappers from the version before; create makes a lost one anew.

After each: the registry opens, `verify` passes for everything `ready`, a re-run completes with what a run
that was never disturbed leaves (a pull: ready, with scores, place and evidence), each mapper that is here
has a row (after a lost registry by `kvhub register`), and `gc` leaves nothing that no row names.
Writes benchmarks/results/hub_kill.json: all runs together, and each. `--add` goes on from earlier ones;
`--merge FILE...` takes files that the script wrote elsewhere as runs, and kills nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
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
    parser.add_argument("--kinds", default="pull,push,gc,migrate,create,fit")
    parser.add_argument("--add", action="store_true", help="to what earlier runs recorded")
    parser.add_argument("--what", default="", help="a word on this run, for the result")
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE", help="runs recorded elsewhere")
    arguments = parser.parse_args()
    earlier = json.loads(RESULT.read_text())["runs"] if arguments.add and RESULT.exists() else []
    if arguments.merge:
        for path in arguments.merge:
            found = json.loads(path.read_text())
            one = found.get("runs", [found])
            earlier += [{"what": arguments.what} | run for run in one]
        record(earlier)
        return int(bool(any(run["broken"] for run in earlier)))
    from loopback_hub import LoopbackHub
    from support.killing import Killing

    kinds = arguments.kinds.split(",")
    begun = time.perf_counter()
    killed = dict.fromkeys(kinds, 0)
    broken: list[str] = []
    run = {
        "what": arguments.what or f"seed {arguments.seed}",
        "killed_before_the_end": killed,
        "broken": broken,
    }
    with tempfile.TemporaryDirectory() as name, LoopbackHub(Path(name) / "hub").serve() as hub:
        killing = Killing(Path(name), hub, fit="fit" in kinds)
        draw = random.Random(arguments.seed)
        for number in range(arguments.kills):
            kind = kinds[number % len(kinds)]
            try:
                killed[kind] += killing.kill(kind, draw)
            except AssertionError as error:
                broken.append(f"{number} {kind}: {error}")
                print(broken[-1], flush=True)
            record([*earlier, run | {"kills": number + 1, "seconds": round(time.perf_counter() - begun, 1)}])
        killing.close()
    return int(bool(broken))


def record(runs: list[dict[str, Any]]) -> None:
    """What was found so far: a run that is stopped has its result, too."""
    killed: Counter[str] = Counter()
    for run in runs:
        killed.update(run["killed_before_the_end"])
    result = {
        "kills": sum(run["kills"] for run in runs),
        "killed_before_the_end": dict(killed),
        "broken": [what for run in runs for what in run["broken"]],
        "seconds": round(sum(run["seconds"] for run in runs), 1),
        "runs": runs,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}), flush=True)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
