"""Eight processes registering, promoting and pulling at once: `python benchmarks/hub_processes.py`.

On SQLite, and on PostgreSQL with --url or a server of its own. No lost row, no duplicate, no lock error.
Writes benchmarks/results/hub_processes.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvhub_registry import MapperRow

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "demo")]
REPO = "tester/shared"

WORKER = """
import sys
from pathlib import Path
from kvhub.artifact.read import read_manifest
from kvhub.catalog import register
from kvhub.hub.pull import fetch
from kvhub.settings import Settings
from kvhub.store.collect import collect
from kvhub.store.lifecycle import name, promote, retire
settings, made, rounds = Settings.load(), Path(sys.argv[1]), int(sys.argv[2])
for turn in range(rounds):
    manifest = read_manifest(made / str(turn))
    place = (made / str(turn)).rename(settings.mappers / manifest.digest)
    register(place, manifest, settings)
    promote(manifest.digest, why="worker")
    name("prod", manifest.digest, why="worker")
    fetch("tester/shared")
    if turn % 4 == 3:
        retire(manifest.digest, why="worker")
        collect(settings)
"""


def main() -> int:
    """Run on both databases; exit code 1 where something was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--url", help="PostgreSQL")
    arguments = parser.parse_args()
    from support import postgres

    found: dict[str, object] = {"rounds": arguments.rounds, "processes": arguments.processes}
    with ExitStack() as stack:
        urls = {"sqlite": ""}
        try:
            urls["postgresql"] = arguments.url or stack.enter_context(postgres.server())
        except postgres.Missing as missing:
            found["postgresql"] = f"not run: {missing}"
        for kind, url in urls.items():
            found[kind] = run(url, arguments.rounds, arguments.processes)
    print(json.dumps(found, indent=2))
    (ROOT / "benchmarks" / "results").mkdir(exist_ok=True)
    (ROOT / "benchmarks" / "results" / "hub_processes.json").write_text(json.dumps(found, indent=2) + "\n")
    return int(any(isinstance(value, dict) and value["faults"] for value in found.values()))


def repeated(rows: list[MapperRow]) -> list[str]:
    """What the primary key does not keep apart: rows of one directory, or a place twice in a row."""
    faults = []
    if len({Path(row.path).resolve() for row in rows}) != len(rows):
        faults.append("two mappers of one directory")
    for row in rows:
        places = Counter((place.repo_id, place.commit) for place in row.locations)
        faults += [f"{row.digest[:12]} is {n} times at {repo}" for (repo, _), n in places.items() if n > 1]
        if len(set(row.aliases)) != len(row.aliases):
            faults.append(f"{row.digest[:12]} has an alias twice")
    return faults


def run(url: str, rounds: int, processes: int) -> dict[str, object]:
    """One database; returns what was found."""
    from loopback_hub import LoopbackHub
    from support.published import make_artifact, make_evidence, publishable

    from kvhub.artifact.evidence import write_evidence
    from kvhub.artifact.read import verify_artifact
    from kvhub.catalog import open_registry
    from kvhub.hub.push import push
    from kvhub.settings import Settings

    with tempfile.TemporaryDirectory() as name, LoopbackHub(Path(name) / "hub").serve() as hub:
        root = Path(name)
        os.environ |= hub.environment | {"HF_HOME": str(root / "hf")}
        publishable(root / "shared", source="org/shared")
        settings = Settings(root / "home", url or f"sqlite:///{root}/home/registry.db", False)
        settings.mappers.mkdir(parents=True)
        push(root / "shared", REPO, settings=settings)
        for worker in range(processes):
            for turn in range(rounds):
                place = root / "made" / str(worker) / str(turn)
                manifest = make_artifact(place, seed=turn, source=f"org/worker-{worker}")
                write_evidence(place, make_evidence(manifest))
        environment = os.environ | {
            "KVHUB_HOME": str(settings.home),
            "KVHUB_DATABASE_URL": settings.database_url,
        }
        begun = time.perf_counter()
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, str(root / "made" / str(worker)), str(rounds)],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for worker in range(processes)
        ]
        faults = []
        for process in workers:
            _, err = process.communicate()
            if process.returncode:
                faults.append(err.strip().splitlines()[-1][:300])
        seconds = time.perf_counter() - begun
        with open_registry(settings) as registry:
            rows = registry.list()
            if problem := registry.health():
                faults.append(problem)
        wanted = processes * (rounds - rounds // 4) + 1
        alive = [row for row in rows if row.state.value == "ready"]
        if len(alive) != wanted:
            faults.append(f"{len(alive)} ready mappers, not {wanted}")
        faults += repeated(rows)
        for row in rows:
            if row.state.value == "retired" and not Path(row.path).exists():
                continue  # gc leaves the row in a registry that others may share
            if verify_artifact(Path(row.path), deep=True).digest != row.digest:
                faults.append(f"{row.digest[:12]} is not what it was")
        return {"rows": len(rows), "ready": len(alive), "faults": faults, "seconds": round(seconds, 1)}


if __name__ == "__main__":
    sys.exit(main())
