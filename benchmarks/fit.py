"""What a fit costs beside the two forwards that it needs, and its memory against the printed bound.

    python -m benchmarks.fit SOURCE TARGET --text FILE [--windows 12 --length 512 --stride 2 --both]

On every window in turn: the forwards alone, then capture and moments. CPU seconds of one thread, which a busy
machine does not change. The peak is that of a whole `kvhub fit` in a process of its own. Writes
`benchmarks/results/fit.json`.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe, write
from kvhub.fit.calibration import calibration_set, load_corpora, row_positions
from kvhub.fit.capture import capture
from kvhub.fit.moments import PairMoments
from kvhub.model.load import LoadedModel, load_model


def seconds(what: Callable[[], Any]) -> float:
    """CPU seconds of `what` in this process."""
    began = time.process_time()
    what()
    return time.process_time() - began


def forward(model: LoadedModel, window: torch.Tensor) -> None:
    """The body of the model over one window, its cache thrown away."""
    with torch.inference_mode():
        model.model.base_model(input_ids=window[None], use_cache=True)


def measure(source: LoadedModel, target: LoadedModel, windows: torch.Tensor, given: Any) -> dict[str, float]:
    """Medians over windows, and the share that capture and moments add."""
    positions = row_positions(given.length, given.stride, 0)
    shapes = source.identity.geometry, target.identity.geometry
    moments = PairMoments.zeros(*shapes, both=given.both)
    forwards, captured = [], []
    folds = 0.0
    for window in windows:
        forwards.append(seconds(lambda: (forward(source, window), forward(target, window))))  # noqa: B023
        held = []
        captured.append(
            seconds(lambda: held.extend((capture(source, window), capture(target, window))))  # noqa: B023
        )
        folds += seconds(lambda: moments.add(held[0].rows(positions), held[1].rows(positions)))  # noqa: B023
    folds += seconds(moments.fold)
    plain, whole, added = statistics.median(forwards), statistics.median(captured), folds / len(windows)
    return {
        "forwards_s": plain,
        "capture_s": whole,
        "moments_s": added,
        "over_forwards": (whole + added) / plain - 1,
        "moments_share": added / plain,
    }


def peak(given: Any) -> dict[str, float]:
    """Peak of resident memory of a whole fit, and the bound that it printed before the start."""
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "kvhub.cli", "fit", given.source, given.target, "--text", given.text]
        command += ["--length", str(given.length), "--stride", str(given.stride), "--k", str(given.k)]
        command += ["--sequences", str(given.peak_windows), *(["--both"] if given.both else [])]
        command += ["--dtype", given.dtype, "--recipe", "ridge"]
        done = subprocess.run(
            command, env={**os.environ, "KVHUB_HOME": home}, capture_output=True, text=True, check=False
        )
    if done.returncode:
        sys.exit(done.stderr)
    found = re.search(r"memory: ([0-9.]+) GB", done.stderr)
    assert found is not None
    bound = float(found[1])
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    return {"printed_gb": bound, "peak_gb": round(used, 3), "peak_over_printed": used / bound}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--text", required=True)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--peak-windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--stride", type=int, default=2)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--both", action="store_true")
    parser.add_argument("--no-peak", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "pair": [Path(given.source).name, Path(given.target).name],
        "windows": given.windows,
        "length": given.length,
        "stride": given.stride,
        "k": given.k,
        "dtype": given.dtype,
        "both": given.both,
    }
    if not given.no_peak:
        result |= peak(given)
    source, target = (load_model(path, getattr(torch, given.dtype)) for path in (given.source, given.target))
    corpora = load_corpora([Path(given.text)])
    text = calibration_set(corpora, source.tokenizer, sequences=given.windows, length=given.length)
    result |= measure(source, target, text.fit, given)
    result["machine"] = describe()
    print(write("fit-both" if given.both else "fit", result).read_text())


if __name__ == "__main__":
    main()
