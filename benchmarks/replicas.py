"""Replicas of one model behind SGLang's own router, live; results/replicas.json.

    pip install sglang-router==0.3.2
    python -m benchmarks.replicas [--home KVHUB_HOME] [--conversations 24]

One server of the small model, two replicas of the large one, a stock server of the large one as reference,
and SGLang's router before the replicas with each of three policies. Two kinds of conversations of four turns:
`native` ones are with the large model from the start; in `switched` ones the small model answers first. Each
turn goes through the router, which does not say to whom; a policy that sends the turns of a conversation to
different replicas is what the exchange is for. Counted of each turn: exact, mapped and prefilled tokens. In
native conversations every answer must be the stock server's; the last turn of switched ones is asked of both
replicas directly as well, which must agree.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import replace
from typing import Any

from benchmarks import machine, servers
from benchmarks.servers import Server, report
from kvhub.exchange import BLOCK_TOKENS

POLICIES = ("round_robin", "random", "cache_aware")
FIRST, NEW, ANSWER, TURNS = 160, 24, 16, 4


@contextlib.contextmanager
def routed(workers: list[Server], policy: str) -> Any:
    """SGLang's router before `workers`, ready."""
    port = servers.free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--policy", policy, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--worker-urls", *(worker.url for worker in workers)]
    command += ["--prometheus-port", str(servers.free_port()), "--log-level", "warn"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        router = replace(workers[0], url=f"http://127.0.0.1:{port}", process=process)
        deadline = time.monotonic() + 120
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit("the router did not get ready: pip install sglang-router==0.3.2")
            with contextlib.suppress(OSError):
                router.get("/readiness", timeout=5)
                break
            time.sleep(0.3)
        yield router
    finally:
        process.terminate()
        process.wait(30)


def served(worker: Server) -> int:
    """Requests that a worker has finished."""
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("sglang:num_requests_total")))


class Run:
    """Conversations through one router."""

    def __init__(self, live: dict[str, Server], replicas: list[Server], router: Server) -> None:
        self.live, self.replicas, self.router = live, replicas, router
        self.turns: dict[str, list[Counter[str]]] = {
            kind: [Counter() for _ in range(TURNS)] for kind in ("native", "switched")
        }
        self.counts: Counter[str] = Counter()

    def converse(self, kind: str, text: list[int], asides: list[list[int]]) -> None:
        """One conversation; `asides` is what the user says in each turn after the first."""
        history = list(text)
        for turn in range(TURNS):
            if turn:
                history += asides[turn - 1]
            if kind == "switched" and not turn:
                answer = self.live["small"].generate(history, ANSWER)
            else:
                before = [served(one) for one in self.replicas]
                answer = self.router.generate(history, ANSWER)
                moved = [served(one) - b for one, b in zip(self.replicas, before, strict=True)]
                self.counts[f"replica {moved.index(max(moved))}"] += 1
            said = report(answer)
            found = self.turns[kind][turn]
            found["prompt"] += len(history)
            found["exact"] += said.get("exact", 0)
            found["mapped"] += said.get("mapped", 0)
            if turn:
                before_this = len(history) - NEW - 1  # the last token of an answer has no row
                found["whole_blocks_before"] += before_this // BLOCK_TOKENS * BLOCK_TOKENS
            self.check(kind, turn, history, answer["output_ids"])
            history += answer["output_ids"]

    def check(self, kind: str, turn: int, history: list[int], answer: list[int]) -> None:
        """Native answers against stock SGLang, those on mapped rows among the replicas."""
        if kind == "native":
            self.counts["compared with stock"] += 1
            self.counts["wrong"] += answer != self.live["stock"].generate(history, ANSWER)["output_ids"]
        elif turn == TURNS - 1:  # asked earlier, both would hold what the next turn is to look for
            self.counts["compared among replicas"] += 1
            others = [one.generate(history, ANSWER)["output_ids"] for one in self.replicas]
            self.counts["replicas differ"] += any(other != answer for other in others)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home")
    parser.add_argument("--conversations", type=int, default=24)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(servers.fitted_home(given.home))
        exchange = stack.enter_context(servers.exchange_directory())
        settings = {"reuse": "always"}
        flags = ["--enable-metrics", "--max-total-tokens", "32768"]
        small = servers.start(stack, "small", home, exchange, settings=settings)
        replicas = [
            servers.start(stack, "large", home, exchange, settings=settings, flags=flags) for _ in range(2)
        ]
        stock = servers.start_stock(stack, "large")
        for server in (small, *replicas, stock):
            server.wait(servers.PATIENCE)
        ids = servers.token_ids()
        at = 0

        def take(count: int) -> list[int]:
            nonlocal at
            at += count
            return ids[at - count : at]

        for policy in POLICIES:
            with routed(replicas, policy) as router:
                run = Run({"small": small, "stock": stock}, replicas, router)
                for number in range(given.conversations):
                    kind = ("native", "switched")[number % 2]
                    run.converse(kind, take(FIRST), [take(NEW) for _ in range(TURNS - 1)])
            turns = {kind: [dict(turn) for turn in found] for kind, found in run.turns.items()}
            found[policy] = {"counts": dict(run.counts), "turns": turns}
            print(policy, json.dumps(found[policy]), flush=True)
    result = {
        "what": "conversations through SGLang's router to two replicas; tokens added up over conversations",
        "router": "sglang-router 0.3.2",
        "conversations": given.conversations,
        "pair": ["small", "large"],
        "policies": found,
        "machine": machine.describe(),
    }
    print(machine.write("replicas", result))


if __name__ == "__main__":
    main()
