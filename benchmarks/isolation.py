"""Isolation on live servers, through every tier; results/isolation.json.

    python -m benchmarks.isolation [--home KVHUB_HOME]

Two servers with HiCache on (so that rows lie on the device, in the host's memory and in the exchange) and
stock ones. Tenants fill all three tiers with exact and lossy rows of a text; then everybody else, in each
way that a request can ask and under forged names, sends the same text to both. The asking tenant never
sent that text: nothing may be reused, of any kind, and the greedy answer must be that of stock SGLang.
The tiers are told apart by what is done before: nothing (device), other texts push it out (host), a
flush (exchange alone).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections import Counter
from typing import Any

from benchmarks import machine, servers
from benchmarks.servers import Server, hints, report

HICACHE = ["--enable-hierarchical-cache", "--hicache-ratio", "3", "--hicache-io-backend", "direct"]
HICACHE += ["--hicache-mem-layout", "page_first_direct", "--max-total-tokens", "8192", "--page-size", "16"]
TENANTS: list[dict[str, str]] = [
    {},
    {"cache_salt": "a"},
    {"extra_key": "a"},
    {"cache_salt": "1:a"},
]
WAYS: dict[str, dict[str, Any]] = {
    "silent": {},
    "declined": {"kv_hints": hints(False)},
    "hint": {"kv_hints": hints(max_hops=2)},
    "hint, named source": {"kv_hints": hints(sources=["small", "large"])},
    "client": {"sampling_params": {"custom_params": {"kvhub": {"reuse": True}}}},
}
FORGED = ("kvhub:", f"kvhub:{'0' * 32}:{'0' * 32}:0:", f"kvhub:{'0' * 32}:{'0' * 32}:1:a", "client:a")
LENGTH = 200


class Matrix:
    """Runs every combination and counts."""

    def __init__(self, pair: dict[str, Server], stock: dict[str, Server]) -> None:
        self.pair, self.stock = pair, stock
        self.ids = servers.token_ids(slice(0, 400000))
        self._next = itertools.count()
        self.counts: Counter[str] = Counter()
        self.hits: list[dict[str, Any]] = []
        self.seen: Counter[str] = Counter()

    def text(self) -> list[int]:
        """A text that begins with tokens of its own."""
        number = next(self._next)
        start = (number * 211) % 90000
        return [3 + number % 4000, 3 + number // 4000, *self.ids[start : start + LENGTH - 2]]

    def fill(self, tenant: dict[str, str], text: list[int], tier: str) -> None:
        """Exact and lossy rows of both models, under one tenant."""
        self.pair["small"].generate(text[:130], 2, **tenant)
        lossy = report(self.pair["large"].generate(text, 2, kv_hints=hints(max_hops=2), **tenant))
        self.seen[f"owner mapped, {tier}"] += lossy["mapped"] > 0
        self.pair["small"].generate([*text, 5], 2, kv_hints=hints(max_hops=2), **tenant)

    def move(self, tier: str) -> None:
        """Push what was filled out of the tiers above this one."""
        for server in self.pair.values():
            if tier == "host":
                for _ in range(24):
                    server.generate(self.text() * 2, 1, cache_salt="filler")
            elif tier == "exchange":
                server.flush()

    def probe(self, tenant: dict[str, str], text: list[int], name: str, way: str, tier: str) -> None:
        """What somebody who never sent this text meets."""
        answer = self.pair[name].generate(text, 8, **{**WAYS[way], **tenant})
        found, meta = report(answer), answer["meta_info"]
        self.counts["probes"] += 1
        self.counts[f"probes, {tier}"] += 1
        reused = found["exact"] + found["mapped"] + meta["cached_tokens"]
        native = self.stock[name].generate(text, 8)["output_ids"]
        if reused or answer["output_ids"] != native:
            self.counts["cross_hits"] += bool(reused)
            self.counts["wrong_answers"] += answer["output_ids"] != native
            self.hits.append({"tenant": tenant, "server": name, "way": way, "tier": tier, "report": found})

    def owner(self, tenant: dict[str, str], text: list[int], tier: str) -> None:
        """The one who did send it still meets its own, so that the tier is not simply empty."""
        details = self.pair["small"].generate([*text, 5], 1, **tenant)["meta_info"]
        where = details.get("cached_tokens_details") or {}
        for kind, tokens in where.items():
            if isinstance(tokens, int) and tokens:
                self.seen[f"owner found {kind} rows, {tier}"] += 1

    def ask(self, owner: dict[str, str], strangers: list[dict[str, str]], way: str, tier: str) -> None:
        """Everybody but the owner, in one way at one server, then silently at the other."""
        shift = TENANTS.index(owner)
        texts = [(stranger, self.text()) for stranger in strangers]
        for _, text in texts:
            self.fill(owner, text, tier)
        self.move(tier)
        self.owner(owner, texts[-1][1], tier)
        for number, (stranger, text) in enumerate(texts):
            # over the owners each of them asks in this way at both
            first, second = ("small", "large") if (number + shift) % 2 else ("large", "small")
            self.probe(stranger, text, first, way, tier)
            # what the first has just published is this stranger's own now, so this one may not map
            self.probe(stranger, text, second, "silent", tier)

    def run(self) -> None:
        strangers = [
            *TENANTS,
            *({"cache_salt": name} for name in FORGED),
            *({"extra_key": n} for n in FORGED),
        ]
        for tier in ("device", "host", "exchange"):
            for owner in TENANTS:
                for way in WAYS:
                    self.ask(owner, [one for one in strangers if one != owner], way, tier)
            print(tier, dict(self.counts), dict(self.seen), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", help="KVHUB_HOME with both mappers (default: fit them first)")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"what": __doc__.split("\n\n")[2], "machine": machine.describe()}
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(servers.fitted_home(arguments.home))
        exchange = stack.enter_context(servers.exchange_directory())
        settings = {"max_hops": 2, "stage_wait_ms": 5000}
        pair = {
            name: servers.start(stack, name, home, exchange, settings=settings, flags=HICACHE)
            for name in ("small", "large")
        }
        stock = {name: servers.start_stock(stack, name) for name in ("small", "large")}
        for server in (*pair.values(), *stock.values()):
            server.wait(servers.PATIENCE)
        matrix = Matrix(pair, stock)
        matrix.run()
        counts = {"cross_hits": 0, "wrong_answers": 0, **matrix.counts}
        result |= {**counts, "so_that_it_means_something": dict(matrix.seen), "hits": matrix.hits[:10]}
    print(machine.write("isolation", result), json.dumps(counts))


if __name__ == "__main__":
    main()
