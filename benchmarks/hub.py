"""Speed and memory of push, pull, verify, export and import: `python benchmarks/hub.py [--mb 4096]`.

The Hub is a process of its own, so memory is the client's alone. The plain client downloads the same
files with `snapshot_download` and does not check them; both take turns, in `--rounds`. Export and import
(kvtransfer's layout, float32) take an artifact of `--interop-mb` (`--interop-only`: nothing else). Writes
benchmarks/results/hub.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "hub.json"
REPO = "tester/bench"

CHILD = """
import json, resource, sys, time
begun = time.perf_counter()
exec(sys.argv[1])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"seconds": time.perf_counter() - begun, "peak_mb": peak}))
"""


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--interop-mb", type=int, default=1024)
    parser.add_argument("--interop-only", action="store_true", help="keep what is recorded of the rest")
    arguments = parser.parse_args()
    if arguments.interop_only:
        with tempfile.TemporaryDirectory(prefix="kvhub-bench-") as name:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "KVHUB_HOME": str(Path(name) / "home")}
            measured = interop(Path(name), environment, arguments.interop_mb)
        record(json.loads(RESULT.read_text()) | {"interop": measured})
        return
    with tempfile.TemporaryDirectory(prefix="kvhub-bench-") as name:
        root = Path(name)
        size = make(root / "made", arguments.mb)
        environment = os.environ | {"PYTHONPATH": str(ROOT / "demo"), "OMP_NUM_THREADS": "1"}
        hub = subprocess.Popen(
            [sys.executable, "-m", "loopback_hub", "--root", str(root / "hub")],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert hub.stdout is not None
        environment |= {
            "HF_ENDPOINT": hub.stdout.readline().strip(),
            "HF_TOKEN": "hf_loopback",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "KVHUB_HOME": str(root / "home"),
            "HF_HOME": str(root / "hf"),
        }
        try:
            found = {"bytes": size, "load": os.getloadavg()[0]} | measure(root, environment, arguments.rounds)
            for name in ("hub", "plain", "made", "home"):
                shutil.rmtree(root / name, ignore_errors=True)
            found["interop"] = interop(root, environment, arguments.interop_mb)
        finally:
            hub.terminate()
            hub.wait()
    record(found)


def record(found: dict[str, object]) -> None:
    """Print it and keep it."""
    print(json.dumps(found, indent=2))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(found, indent=2) + "\n")


def measure(root: Path, environment: dict[str, str], count: int) -> dict[str, object]:
    """A push, then rounds of pull, plain client, hashing and verifying; each step a process of its own."""
    from kvhub.artifact.read import verify_artifact

    def run(code: str) -> dict[str, float]:
        return child(code, environment)

    made = str(root / "made")
    push = (
        f"from pathlib import Path; from kvhub.hub.push import push; "
        f"push(Path({made!r}), {REPO!r}, allow_unevaluated=True)"
    )
    pull = f"from kvhub.hub.pull import fetch; fetch({REPO!r})"
    plain = (
        f"from huggingface_hub import snapshot_download as s; s({REPO!r}, local_dir={str(root / 'plain')!r})"
    )
    steps = {"push": run(push)}
    rounds = []
    for number in range(count):
        for name in ("home", "plain"):
            shutil.rmtree(root / name, ignore_errors=True)
        order = [("pull", pull), ("plain_client", plain)]  # whose turn is first takes turns, too
        found: dict[str, Any] = {name: run(code) for name, code in order[:: 1 if number % 2 == 0 else -1]}
        hashing, verifying = [], []
        for _ in range(2):  # in turn, and the best of each: a busy machine slows both
            begun = time.perf_counter()
            for path in (root / "made").iterdir():
                with path.open("rb") as file:
                    hashlib.file_digest(file, "sha256")
            hashing.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            verify_artifact(root / "made", deep=True)
            verifying.append(time.perf_counter() - begun)
        found["hashing_seconds"] = round(min(hashing), 2)
        found["verify_over_hashing"] = round(min(verifying) / min(hashing), 3)
        found["pull_over_plain_and_hashing"] = round(
            found["pull"]["seconds"] / (found["plain_client"]["seconds"] + min(hashing)), 2
        )
        rounds.append(found | {"load": round(os.getloadavg()[0], 1)})
    return steps | together(rounds)


def together(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of what the rounds found, the most memory that a pull took, and the rounds."""
    ratios = ("verify_over_hashing", "pull_over_plain_and_hashing")
    found = {name: round(statistics.median(one[name] for one in rounds if name in one), 3) for name in ratios}
    return found | {"pull_peak_mb": max(one["pull"]["peak_mb"] for one in rounds), "rounds": rounds}


def child(code: str, environment: dict[str, str]) -> dict[str, float]:
    """Seconds and largest resident size of a step in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {key: round(value, 2) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}


def interop(root: Path, environment: dict[str, str], megabytes: int) -> dict[str, object]:
    """To another layout, in twice the bytes because that is float32, and back."""
    made, out = str(root / "ours"), str(root / "theirs")
    size = make(Path(made), megabytes)
    head = f"from pathlib import Path; made, out = Path({made!r}), Path({out!r}); "
    head += "from kvhub.interop.convert import export_mapper as e, import_mapper as i; "
    importing = "import torch, kvhub.interop.convert"
    back = (
        "from kvhub.artifact.read import read_manifest as r; m = r(made); i(out, m.source, m.target, "
        "layout='kvtransfer')"
    )
    return {
        "bytes": size,
        "load": os.getloadavg()[0],
        "imports_alone": child(importing, environment),
        "export": child(head + "e(made, out, 'kvtransfer')", environment),
        "import": child(head + back, environment),
    }


def make(directory: Path, megabytes: int) -> int:
    """An artifact of about this size, in a child so that its memory is not ours; returns its bytes."""
    sys.path.insert(0, str(ROOT / "tests"))
    code = f"""
import sys, torch
sys.path.insert(0, {str(ROOT / "tests")!r})
from pathlib import Path
from support.mappers import make_identity, make_manifest
from kvhub.artifact.tensors import expected_tensors
from kvhub.artifact.write import write_artifact
one = dict(num_kv_heads=8, head_dim=128, hidden_size=4096, num_attention_heads=32)
layers = max(2, round({megabytes} / 16.8))
source, target = (make_identity(name, num_layers=layers, **one) for name in ("a/a", "b/b"))
manifest = make_manifest(source, target, k=4, weights_dtype="bfloat16")
block = torch.randn(4096, 1024, dtype=torch.bfloat16)
shapes = expected_tensors(manifest)
tensors = {{n: block * 0.5 if s == (4096, 1024) else torch.zeros(s) for n, s in shapes.items()}}
print(write_artifact(Path({str(directory)!r}), manifest, tensors).size)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
