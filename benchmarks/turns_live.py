"""Ten turns that switch between two live servers, under every policy of reuse; results/turns-live.json.

    python -m benchmarks.turns_live [--conversations 100] [--policies "1 hop" "1 hop, healed"]

Policies that are in the file already are replaced, others stay.

Both mappers are fitted here, by default options on the first half of the demo's articles; the conversations
are disjoint windows of the second half, which neither the fit nor the models' training saw. A turn is a
message of 124 tokens (the first: 250) sent to the other model's server than the turn before. Two requests
make it: a greedy answer of 16 tokens, and then the text's own 4 tokens as the answer that the history keeps,
whose whole next-token distributions the server returns. Each is compared with stock SGLang on the same
prompts: KL(stock || kvhub) in nats and top-1 over the 4 positions, and how much of the greedy answer is
the same up to the first difference. Intervals: 95 % bootstrap over conversations.

Conversations go in batches through each turn, four at once; with healing, the servers are left idle
between turns until they have healed, as a server is whose user is reading.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, servers
from benchmarks.servers import Server
from benchmarks.turns import Shape, interval
from kvhub.serving.exposition import scrape

VOCABULARY = 4096
SHAPE = Shape(message=124, answer=4)
GREEDY = 16
CONCURRENT = 4
NAMES = ("small", "large")
HEALED = ("done", "gone", "no_room")
POLICIES: dict[str, dict[str, Any]] = {
    "1 hop": {},
    "1 hop, healed": {"heal": True},
    "1 hop, sink 4": {"exact_prefix": 4},
    "2 hops": {"max_hops": 2},
    "1 hop, tail 64": {"native_tail": 64},
    "2 hops, sink 4, tail 64, healed": {"max_hops": 2, "exact_prefix": 4, "native_tail": 64, "heal": True},
}


@dataclass
class Turns:
    """What one set-up answered, by conversation and turn."""

    logs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """`[4, vocabulary]` log-probabilities after the message, teacher-forced."""
    answers: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    reports: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    healed: dict[str, dict[str, float]] = field(default_factory=dict)
    """By server: how often healing came to which end."""


def halves() -> tuple[str, str]:
    """The demo's text, cut where an article begins."""
    text = servers.TEXT.read_text()
    middle = text.index("\n\n\n", len(text) // 2)
    return text[:middle], text[middle:]


def fit(text: str, home: str) -> None:
    """Mappers both ways, with the options that `kvhub fit` has by default but for the size of the text."""
    with tempfile.TemporaryDirectory(prefix="kvhub-bench-") as place:
        path = Path(place) / "first-half.txt"
        path.write_text(text)
        command = [sys.executable, "-m", "kvhub", "fit", "models/small", "models/large", "--both"]
        command += ["--dtype", "float32", "--sequences", "160", "--length", "256", "--text", str(path)]
        environment = {**os.environ, "KVHUB_HOME": home, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, cwd=servers.ROOT, check=True)


def conversations(text: str, count: int, turns: int) -> list[list[int]]:
    """`count` disjoint windows of token ids, spread over the text."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(servers.ROOT / "models" / "large")(text)["input_ids"]
    length = SHAPE.length(turns)
    step = len(ids) // count
    if step < length:
        raise SystemExit(f"the text holds {len(ids) // length} conversations, not {count}")
    return [ids[i * step : i * step + length] for i in range(count)]


def hold(
    pair: Sequence[Server], talks: dict[int, list[int]], turns: int, found: Turns, *, healing: bool
) -> None:
    """Hold some conversations, turn by turn."""
    end = SHAPE.first
    for turn in range(turns):
        server = pair[turn % 2]
        healed = _healed(server) if healing else 0

        def one(number: int, server: Server = server, turn: int = turn, end: int = end) -> None:
            answer = server.generate(talks[number][:end], GREEDY)
            found.answers[number, turn] = answer["output_ids"]
            found.reports[number, turn] = servers.report(answer)
            found.logs[number, turn] = distributions(server, talks[number], end)

        with ThreadPoolExecutor(CONCURRENT) as pool:
            list(pool.map(one, talks))
        if healing:
            mapped = sum(found.reports[number, turn].get("mapped", 0) > 0 for number in talks)
            _idle(server, healed + mapped)
        end += SHAPE.message + SHAPE.answer


def distributions(server: Server, ids: list[int], end: int) -> np.ndarray:
    """Log-probabilities of every token at each position of the text's own answer."""
    stop = end + SHAPE.answer
    said = server.generate(
        ids[:stop], 1, return_logprob=True, logprob_start_len=end - 1, top_logprobs_num=VOCABULARY
    )
    meta = said["meta_info"]
    rows = meta["input_top_logprobs"][1:]  # of the first token asked for nothing comes before it
    own = [value for value, _, _ in meta["input_token_logprobs"][1:]]
    if len(rows) != SHAPE.answer:
        raise RuntimeError(f"{len(rows)} distributions, not {SHAPE.answer}")
    table = np.full((SHAPE.answer, VOCABULARY), np.nan, dtype=np.float32)
    for position, row in enumerate(rows):
        values = np.asarray([(value, token) for value, token, _ in row])
        table[position, values[:, 1].astype(np.int64)] = values[:, 0]
    if np.isnan(table).any() or not np.allclose(table[np.arange(len(own)), ids[end:stop]], own, atol=1e-5):
        raise RuntimeError("the server's distributions are not whole, or of other positions")
    return table


def _ends(server: Server) -> dict[str, float]:
    return scrape(server.url).by("kvhub_healed_total", "result")


def _healed(server: Server) -> float:
    return sum(_ends(server).get(name, 0.0) for name in HEALED)


def _idle(server: Server, wanted: float) -> None:
    """Wait until so many conversations are healed; some need none, so not longer than something happens."""
    count, since = _healed(server), time.monotonic()
    while count < wanted and time.monotonic() - since < 20:
        time.sleep(0.2)
        now = _healed(server)
        if now != count:
            count, since = now, time.monotonic()


def run(policy: dict[str, Any] | None, home: str, talks: list[list[int]], turns: int, batch: int) -> Turns:
    """All conversations with both servers under one policy; None: stock SGLang."""
    found = Turns()
    flags = ["--max-total-tokens", "65536"]
    with contextlib.ExitStack() as stack:
        if policy is None:
            pair = [servers.start_stock(stack, name, flags=flags) for name in NAMES]
        else:
            mapper = {key: policy[key] for key in ("exact_prefix", "native_tail") if key in policy}
            settings = {key: policy[key] for key in ("max_hops", "heal") if key in policy}
            exchange = stack.enter_context(servers.exchange_directory())
            pair = [
                servers.start(
                    stack,
                    name,
                    home,
                    exchange,
                    settings={"reuse": "always", "publish_wait_ms": 1000.0, **settings},
                    mapper=mapper,
                    flags=[*flags, "--enable-metrics"],
                )
                for name in NAMES
            ]
        for server in pair:
            server.wait(servers.PATIENCE)
        started = time.monotonic()
        for first in range(0, len(talks), batch):
            some = {number: talks[number] for number in range(first, min(first + batch, len(talks)))}
            hold(pair, some, turns, found, healing=bool(policy and policy.get("heal")))
            for server in pair:
                server.flush()  # healing evicts nothing, so it needs room
            print(f"  {first + len(some)} conversations, {time.monotonic() - started:.0f} s", flush=True)
        if policy and policy.get("heal"):
            found.healed = {name: _ends(server) for name, server in zip(NAMES, pair, strict=True)}
    return found


def compare(stock: Turns, ours: Turns, count: int, turns: int) -> dict[str, Any]:
    """Every turn of one policy, the turns after a switch together, and the last."""
    kl, top1, same = (np.zeros((turns, count)) for _ in range(3))
    for number in range(count):
        for turn in range(turns):
            reference, logs = (one.logs[number, turn].astype(np.float64) for one in (stock, ours))
            kl[turn, number] = max((np.exp(reference) * (reference - logs)).sum(-1).mean(), 0.0)
            top1[turn, number] = (reference.argmax(-1) == logs.argmax(-1)).mean()
            equal = np.equal(stock.answers[number, turn], ours.answers[number, turn])
            same[turn, number] = (len(equal) if equal.all() else equal.argmin()) / len(equal)
    tokens = {
        key: [[ours.reports[n, t].get(key, 0) for n in range(count)] for t in range(turns)]
        for key in ("mapped", "exact", "prefilled")
    }
    measures = {"kl": kl, "top1": top1, "answer": same}
    return {
        "switched_turns": {name: interval(values[1:].mean(0)) for name, values in measures.items()},
        "last_turn": {name: interval(values[-1]) for name, values in measures.items()},
        **{f"{key}_tokens": round(float(np.mean(rows, axis=1).sum()), 1) for key, rows in tokens.items()},
        "turns": [
            {
                "model": NAMES[turn % 2],
                **{name: interval(values[turn]) for name, values in measures.items()},
                **{key: round(float(np.mean(rows[turn])), 1) for key, rows in tokens.items()},
            }
            for turn in range(turns)
        ],
    }


def kept(name: str, count: int) -> dict[str, Any]:
    """The policies of an earlier run with as many conversations; those that run again are replaced."""
    path = machine.RESULTS / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return found["policies"] if found.get("conversations") == count else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--batch", type=int, default=20, help="conversations that go through a turn together")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--name", default="turns-live")
    arguments = parser.parse_args()
    first, second = halves()
    talks = conversations(second, arguments.conversations, arguments.turns)
    with tempfile.TemporaryDirectory(prefix="kvhub-bench-") as home:
        fit(first, home)
        result: dict[str, Any] = {
            "what": "two live servers, each turn to the other; against stock SGLang on the same prompts",
            "conversations": len(talks),
            "tokens_of_first_message_message_answer": [SHAPE.first, SHAPE.message, SHAPE.answer],
            "greedy_tokens": GREEDY,
            "text": "fitted on the first half of the demo's articles, held on the second",
            "policies": kept(arguments.name, len(talks)),
        }
        sizes = (len(talks), arguments.turns)
        stock = run(None, home, talks, arguments.turns, arguments.batch)
        for name in arguments.policies:
            print(name, flush=True)
            ours = run(POLICIES[name], home, talks, arguments.turns, arguments.batch)
            row = compare(stock, ours, *sizes)
            mappers = {target: made["digest"][:12] for target, made in servers.mappers(home).items()}
            row |= {"healed": ours.healed} if ours.healed else {}
            result["policies"][name] = {"mappers": mappers, "machine": machine.describe(), **row}
            path = machine.write(arguments.name, result)
            print({key: row[key] for key in ("switched_turns", "last_turn", "mapped_tokens")}, flush=True)
    print(path)


if __name__ == "__main__":
    main()
