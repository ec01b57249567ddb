"""The most that sharing exact rows with the lossy namespace, instead of copying them, could win.

    python -m benchmarks.copies [--tokens 512 --rounds 7 --pairs 2]

A request in the lossy namespace has its own exact device rows copied into slots of its own. A tree in which
both namespaces shared a prefix would need no copy: this sets what it costs beside mapping as many rows and
beside the target's own forward (`forward.py`), in CPU seconds of one thread, rounds taking turns. Slots are
scattered, as in a used pool. The second price, the slots themselves, is counted.
Writes `results/copies.json`.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace

import torch

from benchmarks import machine
from benchmarks.apply import fastest
from benchmarks.forward import forward_seconds
from benchmarks.shapes import PAIRS, make_plan, make_rows, make_table, make_weights
from kvhub_kernels.cpu import CpuApplier
from kvhub_sglang.place import Pool


def measure(name: str, tokens: int, rounds: int) -> dict[str, float | int | str]:
    """One pair in bf16; all layers of the first, of the others four, since all are alike."""
    pair, dtype = PAIRS[name], torch.bfloat16
    plan = make_plan(pair, "full", None if name == next(iter(PAIRS)) else 4)
    applier = CpuApplier(make_weights(plan, dtype), dtype)
    source = make_rows(pair.source[0], *pair.source[1:], tokens, dtype)
    target = make_rows(plan.layers, *pair.target[1:], tokens, dtype)
    tables = make_table(pair.source[2], tokens), make_table(pair.target[2], tokens)
    shape = (4 * tokens, *pair.target[1:])
    buffers = {
        n: [torch.randn(shape).to(dtype) for _ in range(plan.layers)] for n in ("k_buffer", "v_buffer")
    }
    pool = Pool(SimpleNamespace(**buffers))
    free = torch.randperm(4 * tokens)
    copied, mapped = fastest(
        [
            lambda: pool.copy(free[:tokens], free[tokens : 2 * tokens]),
            lambda: applier.apply(source, target, *tables),
        ],
        rounds,
        time.process_time,
    )
    forward = forward_seconds(name, tokens, dtype) * plan.layers
    return {
        "pair": name,
        "tokens": tokens,
        "target_layers": plan.layers,
        "copy_over_map": round(copied / mapped, 4),
        "copy_over_forward": round(copied / forward, 5),
        "kib_a_token_all_layers": 2
        * pair.target[0]
        * pair.target[1]
        * pair.target[2]
        * dtype.itemsize
        // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=2, help="the first so many of benchmarks.shapes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in list(PAIRS)[: arguments.pairs]:
        rows.append(measure(name, arguments.tokens, arguments.rounds))
        print(rows[-1], flush=True)
    print(machine.write("copies", {"machine": machine.describe(), "rows": rows}))


if __name__ == "__main__":
    main()
