"""Thousands of requests at two live servers while everything around them breaks; results/soak.json.

    python -m benchmarks.soak [--requests 2000] [--home KVHUB_HOME] [--name soak]

Clients hold conversations that switch between the shipped models at random: every way to ask for
reuse or not, four tenants, forged salts, streams, parallel samples, aborts, clients that go away.
Meanwhile blocks are corrupted, swapped and deleted, the exchange disappears, becomes slow, full,
unreadable or unwritable, and caches are flushed. SGLang's own memory checks are strict: one
lost slot ends a server. Three parts: plain, with HiCache, with forced retraction. Ctrl-C stops asking: what
was answered until then is compared and written.

wrong: of the answers under which no mapped row lay, those that differ from what stock SGLang
answers to the same tokens afterwards (greedy; a place where the two best tokens are within 1e-3 in
log-probability is a tie, counted apart). aborted: answers that ended in an abort or an error without
the client's doing. leaked_slots: slots that an idle server holds for nobody.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine, servers
from benchmarks.servers import Server
from benchmarks.soak_faults import Faults, Memory, alive, check_slots
from benchmarks.soak_traffic import STOP, Said, Traffic

STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
}
TIE = 1e-3


@dataclass(frozen=True)
class Part:
    """A way to run both servers, and its share of the requests."""

    name: str
    share: float
    flags: dict[str, list[str]]
    environment: dict[str, str]


HICACHE = ["--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-io-backend", "direct"]
HICACHE += ["--hicache-mem-layout", "page_first_direct", "--max-total-tokens", "6144"]
CHUNKED = ["--chunked-prefill-size", "128"]
PARTS = (
    Part(
        "plain",
        0.5,
        {"small": CHUNKED, "large": ["--page-size", "16", *CHUNKED]},
        {},
    ),
    Part(
        "hicache",
        0.25,
        {"small": ["--page-size", "16", *HICACHE], "large": ["--page-size", "16", *HICACHE]},
        {},
    ),
    Part(
        "retraction",
        0.25,
        {
            "small": ["--page-size", "64", "--disable-overlap-schedule"],
            "large": ["--chunked-prefill-size", "32", "--max-total-tokens", "8192"],
        },
        {"SGLANG_TEST_RETRACT": "1"},
    ),
)


def soak(
    part: Part,
    requests: int,
    seconds: float,
    home: str,
    settings: dict[str, Any],
    seed: int,
    clients: int,
    keep: Path,
) -> tuple[dict[str, Any], list[Said]]:
    """One part: servers up, traffic and faults together, servers checked, servers down."""
    documents = documents_of(seed)
    with contextlib.ExitStack() as stack:
        exchange = stack.enter_context(servers.exchange_directory())
        control = exchange.with_name("faults.json")
        control.write_text("{}")
        faults = Faults(exchange, control, [], seed)
        environment = {**STRICT, **part.environment, **faults.environment}
        limits = {"exchange_max_bytes": 60 << 20, "max_hops": 2, **settings}
        pair = {
            name: servers.start(
                stack,
                name,
                home,
                exchange,
                settings=limits,
                flags=["--enable-metrics", *part.flags[name]],
                environment=environment,
                log=keep / f"{part.name}-{name}.log",
            )
            for name in ("small", "large")
        }
        for server in pair.values():
            server.wait(servers.PATIENCE)
        traffic = Traffic(pair, documents, requests, clients, seed, seconds)
        faults.servers, faults.pause = list(pair.values()), traffic.may_go
        started = time.monotonic()
        with Memory(pair, traffic.done) as memory, faults:
            traffic.run()
        seconds = time.monotonic() - started
        found: dict[str, Any] = {
            "part": part.name,
            "requests": sum(traffic.went.values()),
            "seconds": round(seconds, 1),
            "flags": part.flags,
            "environment": part.environment,
            "traffic": dict(sorted(traffic.went.items())),
            "faults": dict(sorted(faults.counts.items())),
            "servers": {},
        }
        for name, server in pair.items():
            found["servers"][name] = ending(server, part.name) | {"memory": memory.summary(name)}
    return found | outcomes(traffic.answers), traffic.answers


def documents_of(seed: int) -> list[list[int]]:
    """Sixteen texts of 600 tokens, others in every part."""
    ids = servers.token_ids()
    starts = [(20000 + (seed * 16 + i) * 600) % (len(ids) - 600) for i in range(16)]
    return [ids[start : start + 600] for start in starts]


def ending(server: Server, part: str) -> dict[str, Any]:
    """What a server has to show at the end: alive, nothing lost, kvhub still on."""
    log = server.log.read_text(errors="replace")
    if not alive(server):
        return {"alive": False, "log": log[-3000:], "leaked_slots": None}
    before, capacity = check_slots(server)
    server.flush()
    after, _ = check_slots(server)
    metrics = [line for line in server.get("/metrics").splitlines() if line.startswith("kvhub_")]
    return {
        "alive": True,
        "capacity": capacity,
        "leaked_slots": max(before, after),
        "kvhub_off": "kvhub is off" in log,
        "memory_complaints": log.count("memory leak") + log.count("double free"),
        "tracebacks": log.count("Traceback"),
        "retractions": log.count("retract"),
        "metrics": sum_up(metrics),
    }


def sum_up(lines: Iterable[str]) -> dict[str, float]:
    """Counters by name and label, over processes; histogram buckets left out."""
    total: Counter[str] = Counter()
    for line in lines:
        name, _, value = line.rpartition(" ")
        if "_bucket{" not in name and "_created" not in name:
            total[name] += float(value)
    return {name: round(value, 4) for name, value in sorted(total.items())}


def outcomes(answers: list[Said]) -> dict[str, Any]:
    """Everything that can be counted without a reference."""
    reports = [said.report for said in answers if said.report is not None]
    failed = [said for said in answers if not said.ours and said.finished not in ("length", "stop")]
    bad = [
        said
        for said in answers
        if said.report is not None
        and said.report["exact"] + said.report["mapped"] + said.report["prefilled"] != len(said.prompt)
    ]
    return {
        "answers": len(answers),
        "aborted": len(failed),
        "failures": [f"{said.server} {said.mode}: {said.finished}"[:300] for said in failed[:10]],
        "aborted_by_clients": sum(said.ours for said in answers),
        "without_report": sum(said.report is None and not said.ours for said in answers),
        "token_counts_that_do_not_add_up": len(bad),
        "reasons": dict(Counter(str(report["reason"]) for report in reports).most_common()),
        "tokens": {key: sum(report[key] for report in reports) for key in ("exact", "mapped", "prefilled")},
    }


def compare(answers: list[Said], keep: Path) -> dict[str, Any]:
    """Hold each answer against stock SGLang, which answers the same tokens again."""
    wrong: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        stock = {
            name: servers.start_stock(stack, name, log=keep / f"stock-{name}.log")
            for name in ("small", "large")
        }
        for server in stock.values():
            server.wait(servers.PATIENCE)

        def reference(key: tuple[str, tuple[int, ...]], length: int) -> list[int]:
            answer = stock[key[0]].generate(key[1], length)
            return list(answer["output_ids"])

        wanted: dict[tuple[str, tuple[int, ...]], int] = {}
        for said in answers:
            key = (said.server, said.prompt)
            wanted[key] = max(wanted.get(key, 1), len(said.answer))
        with ThreadPoolExecutor(4) as pool:
            native = dict(zip(wanted, pool.map(reference, wanted, wanted.values()), strict=True))
        for said in answers:
            expected = native[(said.server, said.prompt)][: len(said.answer)]
            kind = "mapped" if said.mapped else "exact"
            if list(said.answer) == expected:
                counts[f"{kind}_equal"] += 1
            elif said.mapped:
                counts["mapped_different"] += 1
            elif tie(stock[said.server], said, expected):
                counts["exact_ties"] += 1
            else:
                counts["exact_wrong"] += 1
                wrong.append(
                    {
                        "server": said.server,
                        "mode": said.mode,
                        "report": said.report,
                        "prompt": said.prompt,
                        "answer": said.answer,
                        "expected": expected,
                    }
                )
    return {
        "wrong": counts["exact_wrong"],
        "compared": dict(sorted(counts.items())),
        "wrong_answers": wrong[:5],
    }


def tie(server: Server, said: Said, expected: list[int]) -> bool:
    """Whether the first difference lies where the model itself hardly prefers one token."""
    at = next(i for i, (a, b) in enumerate(zip(said.answer, expected, strict=True)) if a != b)
    answer = server.generate(
        [*said.prompt, *expected[:at]], 1, return_logprob=True, top_logprobs_num=2, logprob_start_len=-1
    )
    best = {token: value for value, token, *_ in answer["meta_info"]["output_top_logprobs"][0]}
    pair = [best.get(said.answer[at]), best.get(expected[at])]
    return None not in pair and abs(pair[0] - pair[1]) < TIE  # type: ignore[operator]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="of traffic, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--home", help="KVHUB_HOME with both mappers (default: fit them first)")
    parser.add_argument("--name", default="soak", help="results/NAME.json")
    parser.add_argument("--parts", nargs="+", default=[part.name for part in PARTS])
    parser.add_argument("--logs", type=Path, help="keep the servers' logs here")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON: serving settings to change")
    arguments = parser.parse_args()
    chosen = [part for part in PARTS if part.name in arguments.parts]
    total = sum(part.share for part in chosen)
    result: dict[str, Any] = {"what": __doc__.split("\n\n")[2], "machine": machine.describe()}
    result |= {
        "clients": arguments.clients,
        "seed": arguments.seed,
        "settings": arguments.settings,
        "parts": [],
    }
    answers: list[Said] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # stop asking, compare what was answered, write it
        signal.signal(number, lambda *_: STOP.set())
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(servers.fitted_home(arguments.home))
        keep = arguments.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        for number, part in enumerate(chosen):
            count = round(arguments.requests * part.share / total)
            seed = arguments.seed + number
            if STOP.is_set():
                break
            found, said = soak(
                part,
                count,
                arguments.minutes * 60 * part.share / total,
                home,
                arguments.settings,
                seed,
                arguments.clients,
                keep,
            )
            result["parts"].append(found)
            answers += said
            print(json.dumps(found), flush=True)
        compared = compare(answers, keep)
    ends = [server for part in result["parts"] for server in part["servers"].values()]
    dead = [end for end in ends if not end["alive"]]
    summary = {
        "requests": sum(part["requests"] for part in result["parts"]),
        "wrong": compared["wrong"],
        "aborted": sum(part["aborted"] for part in result["parts"]),
        "leaked_slots": None if dead else sum(end["leaked_slots"] for end in ends),
        "servers_that_died": len(dead),
        "servers_that_switched_kvhub_off": sum(bool(end.get("kvhub_off")) for end in ends),
        "token_counts_that_do_not_add_up": sum(p["token_counts_that_do_not_add_up"] for p in result["parts"]),
    }
    path = machine.write(arguments.name, summary | compared | result)
    print(json.dumps(summary), path)


if __name__ == "__main__":
    main()
