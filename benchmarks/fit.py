"""What a fit costs beside the two forwards that it needs, and its memory against the printed bound.

    python -m benchmarks.fit SOURCE TARGET --text FILE [--windows 12 --length 512 --stride 2 --both --no-peak]

On every window in turn: the forwards alone, then capture, rows and moments. CPU seconds of one thread, which
a busy machine changes little. Beside them the ceilings of the same run (a plain product in the dtype of the
moments and of the models, a copy) and the moments taken head by head, as a plain loop does. The peak is that
of a whole `kvhub fit` in a process of its own. Writes `benchmarks/results/fit.json`, with `--name NAME`
`fit-NAME.json`.
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

from benchmarks.apply import ceilings
from benchmarks.machine import describe, write
from kvhub.fit.calibration import calibration_set, load_corpora, row_positions
from kvhub.fit.capture import Capture, capture
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


def forward_flops(model: LoadedModel, tokens: int) -> int:
    """Of the body over one window: its linear layers, and attention at half of tokens^2 (it is causal)."""
    linear = sum(
        layer.weight.numel()
        for layer in model.model.base_model.modules()
        if isinstance(layer, torch.nn.Linear)
    )
    config = model.model.config
    width = config.num_attention_heads * model.identity.geometry.head_dim
    return 2 * tokens * linear + 2 * tokens**2 * width * config.num_hidden_layers


def moment_flops(moments: PairMoments, rows: int) -> int:
    """Of the products that `rows` rows are added by, keys and values."""
    return 2 * rows * sum(band.cost for side in (moments.key, moments.value) for band in side.bands())


def head_by_head(source: tuple[torch.Tensor, ...], target: tuple[torch.Tensor, ...], given: Any) -> int:
    """The same moments as an eager loop takes them, a product for every head; returns its FLOPs.

    source, target: (content keys, values), float64 `[rows, features]`.
    """
    flops = 0
    for x, y in zip(source, target, strict=True):
        pairs = [(x, x, given.heads[0]), (x, y, given.heads[1])] + [(y, y, given.heads[1])] * given.both
        for left, right, dim in pairs:
            for head in right.split(dim, dim=1):
                left.T @ head
            flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return flops


def bytes_of_rows(one: Capture, rows: tuple[torch.Tensor, ...]) -> int:
    """Read and written where a window's rows are taken: content keys and values in, float64 out."""
    share = len(rows[0]) / len(one.values[0])
    return int(share * sum(t.nbytes for t in (*one.content_keys, *one.values))) + sum(t.nbytes for t in rows)


def measure(source: LoadedModel, target: LoadedModel, windows: torch.Tensor, given: Any) -> dict[str, float]:
    """Medians over windows, the share that captures and moments add, and rates beside their ceilings."""
    positions = row_positions(given.length, given.stride, 0)
    shapes = source.identity.geometry, target.identity.geometry
    given.heads = tuple(shape.head_dim for shape in shapes)
    moments = PairMoments.zeros(*shapes, both=given.both)
    forwards, targets, captured, taken, moved = [], [], [], [], []
    folds = loop = 0.0
    for number, window in enumerate(windows):
        targets.append(seconds(lambda: forward(target, window)))  # noqa: B023
        forwards.append(targets[-1] + seconds(lambda: forward(source, window)))  # noqa: B023
        held: list[Capture] = []
        captured.append(
            seconds(lambda: held.extend((capture(source, window), capture(target, window))))  # noqa: B023
        )
        rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        taken.append(seconds(lambda: rows.extend(one.rows(positions) for one in held)))  # noqa: B023
        moved.append(sum(bytes_of_rows(*pair) for pair in zip(held, rows, strict=True)))
        folds += seconds(lambda: moments.add(*rows))  # noqa: B023
        if number == 0:
            loop_flops = head_by_head(*rows, given)  # warms up
            loop = seconds(lambda: head_by_head(*rows, given))  # noqa: B023
    folds += seconds(moments.fold)
    dtype = getattr(torch, given.dtype)
    top = ceilings(time.process_time, (torch.float64, dtype))
    plain, whole = statistics.median(forwards), statistics.median(captured)
    added = (folds + sum(taken)) / len(windows)
    work = forward_flops(source, given.length) + forward_flops(target, given.length)
    rates = {
        "forwards": (work / plain / 1e9, top[dtype]),
        "moments": (moment_flops(moments, len(positions) * len(windows)) / folds / 1e9, top[torch.float64]),
        "head_by_head": (loop_flops / loop / 1e9, top[torch.float64]),
    }
    copied = statistics.median(moved) / statistics.median(taken) / 1e9
    return {
        "forwards_s": plain,
        "target_forward_s": statistics.median(targets),
        "capture_s": whole,
        "rows_s": statistics.median(taken),
        "moments_s": added,
        "head_by_head_s": loop,
        "over_forwards": (whole + added) / plain - 1,
        "moments_share": added / plain,
        "times_head_by_head": loop / (folds / len(windows)),
        **{f"{name}_gflops": round(rate, 1) for name, (rate, _) in rates.items()},
        **{f"{name}_of_ceiling": round(rate / most, 3) for name, (rate, most) in rates.items()},
        "rows_gbytes_per_second": round(copied, 2),
        "rows_of_copy": round(copied / top["copy"], 3),
        "ceiling_float64_gflops": round(top[torch.float64], 1),
        f"ceiling_{given.dtype}_gflops": round(top[dtype], 1),
        "ceiling_copy_gbytes_per_second": round(top["copy"], 2),
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
    parser.add_argument("--name", default="", help="of the file in benchmarks/results, after `fit-`")
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
    name = given.name or ("both" if given.both else "")
    print(write(f"fit-{name}" if name else "fit", result).read_text())


if __name__ == "__main__":
    main()
