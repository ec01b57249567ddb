"""Hostile manifests, weights and Hub answers, all of the corpus: `python benchmarks/hub_fuzz.py`.

Every case must be a typed refusal or leave the very mapper; writes benchmarks/results/hub_fuzz.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "demo")]
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> int:
    """Run the corpus; exit code 1 where a case was no refusal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1200)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    from loopback_hub import LoopbackHub

    with tempfile.TemporaryDirectory() as name, LoopbackHub(Path(name) / "hub").serve() as hub:
        root = Path(name) / "fuzz"
        os.environ |= hub.environment | {"HF_HOME": str(Path(name) / "hf"), "KVHUB_HOME": str(root / "home")}
        logging.disable(logging.CRITICAL)
        from support import corpus
        from support.fuzzing import Fuzz, impatient

        fuzz = Fuzz(root, hub)
        before, memory = corpus.outside(root, fuzz.settings.home), _peak()
        found: Counter[str] = Counter()
        faults: dict[int, str] = {}
        begun = time.perf_counter()
        with impatient():
            for number in range(arguments.first, arguments.first + arguments.cases):
                try:
                    found[fuzz.case(number)] += 1
                except Exception:
                    faults[number] = traceback.format_exc(limit=-3, chain=False)[-1500:]
                    print(f"case {number}: {faults[number]}", flush=True)
        strays = sorted(corpus.outside(root, fuzz.settings.home) - before)
        left = {path.name for path in fuzz.settings.mappers.glob("*")} - {".lock", fuzz.manifest.digest}
        result = {
            "cases": arguments.cases,
            "outcomes": dict(sorted(found.items())),
            "hub_cases": fuzz.hub_cases,
            "hub_cases_that_met_their_fault": fuzz.delivered,
            "faults": len(faults),
            "written_outside_the_store": strays,
            "left_in_the_store": sorted(left),
            "more_memory_mb": round((_peak() - memory) / 1024, 1),
            "seconds": round(time.perf_counter() - begun, 1),
        }
    print(json.dumps(result, indent=2))
    (ROOT / "benchmarks" / "results").mkdir(exist_ok=True)
    (ROOT / "benchmarks" / "results" / "hub_fuzz.json").write_text(json.dumps(result, indent=2) + "\n")
    return int(bool(faults or strays or left) or fuzz.delivered != fuzz.hub_cases)


def _peak() -> int:
    """Largest resident size so far, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main())
