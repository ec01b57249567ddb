"""Time to the first token after a switch of models: mapped prefix against a full prefill.

    python -m benchmarks.handoff models/small models/large --name shipped --lengths 256 512 1024 2000

    python -m benchmarks.handoff QWEN-0.5B QWEN-1.5B --name qwen2.5-coder --dtype bfloat16 \
        --lengths 512 1024 2048 --once 4096 --pairs 5

The second needs a fitted pair, 8 GB of memory and a quiet machine for a quarter of an hour.

Two live servers (`kvhub serve`). For each length and repetition there are two texts
of that length; the source has answered one. On the target that one is asked with reuse
and the other without, in alternating order, each for the first time: a pair. The
ratio is prefill / reuse, so above 1 reuse is faster. Excluded: the source's own
prefill (it happened in the turn before), shown beside. Included: everything the
target does, the read of the blocks, their checks and the map. Two tokens are asked for,
so that the first is streamed before the request ends and publishes its own blocks.
Beside it, of the same run (`rates`): FLOP/s and GB/s of what kvhub did on the scheduler's
thread, the ceilings (a plain product, a copy), the eager loop over heads on as many rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.handoff_rates import rates, top_of
from benchmarks.servers import Server, exchange_directory, hints, serve


def ask(server: Server, prompt: list[int], *, reuse: bool) -> tuple[float, dict[str, Any]]:
    """Milliseconds until the first streamed token, and kvhub's report."""
    fields = {"kv_hints": hints()} if reuse else {}
    answer = server.stream(prompt, 2, timeout=1800, **fields)
    return answer.first_ms, answer.last["meta_info"]["kvhub"][0]


def measure(source: Server, target: Server, texts: list[list[int]]) -> list[dict[str, Any]]:
    """One pair per two texts (all of one length)."""
    pairs = []
    for number in range(len(texts) // 2):
        known, other = texts[2 * number : 2 * number + 2]
        source_ms = ask(source, known, reuse=False)[0]
        time.sleep(1)  # its blocks are written: what is not yet there when the target asks is not mapped
        order = (True, False) if number % 2 else (False, True)
        found = {reuse: ask(target, known if reuse else other, reuse=reuse) for reuse in order}
        report = found[True][1]
        assert found[False][1]["mapped"] == 0
        pairs.append(
            {
                "reuse_ms": found[True][0],
                "prefill_ms": found[False][0],
                "ratio": found[False][0] / found[True][0],
                "mapped": report["mapped"],
                "prefilled": report["prefilled"],
                "handoff_ms": report["ms"],
                "reason": report["reason"],
                "mapper": report["mapper"],
                "source_prefill_ms": source_ms,
            }
        )
        print(json.dumps(pairs[-1]), file=sys.stderr, flush=True)
    return pairs


def rates_of(pairs: list[dict[str, Any]], top: dict[str, float]) -> dict[str, Any] | None:
    """`rates` of the medians of the mapped pairs; None where there are none. Fills `top` the first time."""
    from kvhub.mapper.load import load_mapper
    from kvhub.mapper.ridge import RidgeMapper
    from kvhub.settings import Settings

    mapped = [pair for pair in pairs if pair["mapped"]]
    if not mapped:
        return None
    mapper = load_mapper(Settings.load().mappers / mapped[0]["mapper"])
    if not isinstance(mapper, RidgeMapper):
        return None
    if not top:
        top |= top_of(mapper)
    tokens, handoff, prefill = (
        statistics.median(pair[name] for pair in mapped) for name in ("mapped", "handoff_ms", "prefill_ms")
    )
    return rates(mapper, int(tokens), handoff, prefill, top)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--name", required=True, help="results/handoff-NAME.json")
    parser.add_argument("--text", type=Path, default=Path("demo/text/wikipedia.txt"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2000])
    parser.add_argument("--once", type=int, nargs="+", default=[], help="lengths of which one pair is enough")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument(
        "--warmup", type=int, default=1, help="pairs of the first length that are not counted"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype")
    parser.add_argument("--allow-draft", action="store_true", help="a mapper that has not passed the gate")
    arguments = parser.parse_args()

    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(arguments.target)(arguments.text.read_text())["input_ids"]
    environment = {"OMP_NUM_THREADS": str(arguments.threads)}
    draft = ["--allow-draft"] if arguments.allow_draft else []
    flags = ["--max-total-tokens", "16384"]
    flags += ["--dtype", arguments.dtype] if arguments.dtype else []
    result: dict[str, Any] = {
        "what": "TTFT on the target, full prefill / reuse, pairs in one run",
        "source": Path(arguments.source).name,
        "target": Path(arguments.target).name,
        "dtype": arguments.dtype or "as fitted",
        "threads_per_server": arguments.threads,
        "excluded": "the source's prefill and its publishing, which belong to the turn before",
        "machine": machine.describe(),
        "lengths": [],
    }
    with contextlib.ExitStack() as stack:
        exchange = stack.enter_context(exchange_directory())
        # only the target maps: the source answers as if it were alone
        servers = [
            serve(stack, model, exchange, ["--worth", "always", *more], flags=flags, environment=environment)
            for model, more in (
                (arguments.source, []),
                (arguments.target, ["--reuse-from", arguments.source, *draft]),
            )
        ]
        for server in servers:
            server.wait()
        offset, top = 0, dict[str, float]()
        for length in (*arguments.lengths, *arguments.once):
            warmup = 0 if result["lengths"] else arguments.warmup
            each = 2 * ((1 if length in arguments.once else arguments.pairs) + warmup)
            texts = []
            for number in range(each):
                start = (offset + number * (length // 2 + 7)) % (len(ids) - length)
                texts.append([*ids[start : start + length - 1], 7 + number])
            offset += 131
            # a different first token makes every text new to both servers
            texts = [[ids[(offset + 17 * n) % 4000], *text[1:]] for n, text in enumerate(texts)]
            pairs = measure(servers[0], servers[1], texts)[warmup:]
            result["lengths"].append(
                {
                    "tokens": length,
                    "ratio": machine.interval([pair["ratio"] for pair in pairs]),
                    "reuse_ms": statistics.median(pair["reuse_ms"] for pair in pairs),
                    "prefill_ms": statistics.median(pair["prefill_ms"] for pair in pairs),
                    "rates": rates_of(pairs, top),
                    "pairs": pairs,
                }
            )
            path = machine.write(f"handoff-{arguments.name}", result)
    print(f"{'tokens':>7} {'prefill / reuse':>16}  95 %")
    for row in result["lengths"]:
        ratio = row["ratio"]
        print(f"{row['tokens']:>7} {ratio['median']:>16.2f}  {ratio['low']:.2f} .. {ratio['high']:.2f}")
    for row in result["lengths"]:
        print(row["tokens"], row["rates"])
    print(path)


if __name__ == "__main__":
    main()
