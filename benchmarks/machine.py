"""What every result file says about where it was measured, and how ratios are summarised."""

from __future__ import annotations

import csv
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("kvhub", "torch", "transformers", "sglang", "triton", "numpy")


def describe() -> dict[str, Any]:
    """Processor, cores, memory, load and versions; no names or paths of the machine."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory) / 2**20, 1),
        "gpu": None,
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def interval(values: list[float], *, seed: int = 0, draws: int = 4000) -> dict[str, float]:
    """Median with a 95 % bootstrap interval over the values."""
    data = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(data), (draws, len(data)))
    medians = np.median(data[picks], axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return {"median": float(np.median(data)), "low": float(low), "high": float(high), "n": len(values)}


def write(name: str, result: dict[str, Any]) -> Path:
    """Keep a result as `results/<name>.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Keep lines that all have the first one's columns."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
