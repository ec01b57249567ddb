"""Traffic and size of an exchange for ten models, simulated and by formula; results/scaling.json.

    python -m benchmarks.scaling [--trace conversation_trace.jsonl]

The traffic has the shape of the conversation trace published with Mooncake (FAST '25,
Apache-2.0, FAST25-release/traces in its repository; 12,031 requests in 59 minutes). With
`--trace` that file is replayed, as many shifted copies of it as reach the wanted rate;
without it conversations are drawn from the distributions that were fitted to it (`SHAPE`).
A turn's history is what it shares with the turn before, and that turn's answer.

Every conversation begins on one of ten models, by popularity, and before each later turn
moves with probability `switch` to another model of its family. What kvhub would then do is
played through: own exact rows first, then rows mapped from other models (`max_hops`), the
rest computed; everything is published. The exchange forgets the least recently used.
No server keeps anything of its own: every reused row crosses the network, the worst case.

Formulas (docs/scaling.md) are computed beside it from the means of the turns alone, and from
the gaps between them for the hit ratio of a bounded exchange (Che's approximation).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import machine

MODELS = {  # layers, KV heads, head_dim (configurations of the published models), share of conversations
    "Qwen3-0.6B": (28, 8, 128, 0.05),
    "Qwen3-1.7B": (28, 8, 128, 0.05),
    "Qwen3-4B": (36, 8, 128, 0.10),
    "Qwen3-8B": (36, 8, 128, 0.20),
    "Qwen3-14B": (40, 8, 128, 0.10),
    "Qwen3-32B": (64, 8, 128, 0.20),
    "Llama-3.2-1B": (16, 8, 64, 0.05),
    "Llama-3.2-3B": (28, 8, 128, 0.05),
    "Llama-3.1-8B": (32, 8, 128, 0.10),
    "Llama-3.1-70B": (80, 8, 128, 0.10),
}
RATE = 10.0  # turns a second; everything but the ratios is proportional to it
SHAPE = {  # lognormals (mean and deviation of the logarithm), fitted to the conversation trace
    "first": (8.510, 1.263),
    "growth": (6.975, 1.712),
    "gap": (4.880, 0.980),
    "output": (5.336, 1.358),
}
TURNS = {1: 5131, 2: 1311, 3: 464, 4: 200, 5: 117, 6: 55, 7: 27, 8: 26, 9: 10, 10: 16, 11: 5, 12: 28}
MOST_TOKENS, BLOCK, MIN_SPAN = 126_195, 64, 64


def bytes_per_token(model: str, itemsize: int = 2) -> int:
    layers, heads, dim, _ = MODELS[model]
    return 2 * layers * heads * dim * itemsize


def mean_bytes_per_token() -> float:
    """Over conversations, by the popularity of the models."""
    return sum(bytes_per_token(model) * share for model, (*_, share) in MODELS.items())


def family(model: str) -> list[str]:
    return [other for other in MODELS if other.split("-")[0][:4] == model.split("-")[0][:4]]


@dataclass(frozen=True)
class Turn:
    """prompt, history and output in tokens; time in seconds."""

    time: float
    conversation: int
    prompt: int
    history: int
    output: int


# ---- traffic


def from_trace(path: Path) -> list[Turn]:
    """A request continues the one that last had its last known block, unless that is a common one."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    uses: dict[int, int] = {}
    for row in rows:
        for block in row["hash_ids"]:
            uses[block] = uses.get(block, 0) + 1
    owner: dict[int, int] = {}
    conversation: list[int] = []
    turns = []
    for number, row in enumerate(rows):
        known = 0
        while known < len(row["hash_ids"]) and row["hash_ids"][known] in owner:
            known += 1
        last = row["hash_ids"][known - 1] if known else -1
        history, before = 0, -1
        if known and uses[last] <= 30:
            before = owner[last]
            history = min(row["input_length"], known * 512 + rows[before]["output_length"])
        conversation.append(conversation[before] if before >= 0 else number)
        turns.append(
            Turn(row["timestamp"] / 1e3, conversation[-1], row["input_length"], history, row["output_length"])
        )
        owner.update(dict.fromkeys(row["hash_ids"], number))
    return turns


def from_shape(count: int, seconds: float, seed: int = 0) -> list[Turn]:
    """`count` conversations that begin evenly over `seconds`."""
    random_ = np.random.default_rng(seed)

    def draw(name: str) -> float:
        return float(random_.lognormal(*SHAPE[name]))

    lengths = random_.choice(list(TURNS), count, p=np.array(list(TURNS.values())) / sum(TURNS.values()))
    turns = []
    for number, length in enumerate(lengths):
        time, history = float(random_.uniform(0, seconds)), 0
        for turn in range(int(length)):
            new = max(1.0, draw("growth") if turn else draw("first"))
            prompt = int(min(MOST_TOKENS, history + new))
            output = int(min(2000, max(1.0, draw("output"))))
            turns.append(Turn(time, number, prompt, min(history, prompt), output))
            history = min(prompt + output, MOST_TOKENS)
            time += draw("gap")
    return sorted(turns, key=lambda turn: turn.time)


def copies(turns: list[Turn], rate: float, seed: int = 1) -> tuple[list[Turn], tuple[float, float]]:
    """Copies begun at random over two spans, `rate` turns a second; counted is the second span.

    In the first span the exchange fills; conversations are shifted whole.
    """
    span = max(turn.time for turn in turns) + 1.0
    wanted = max(1, round(rate * span / len(turns)))
    chance = random.Random(seed)
    offset = 1 + max(turn.conversation for turn in turns)
    found = []
    for copy in range(2 * wanted):
        lap, shift = copy // wanted, chance.uniform(0, span)
        first: dict[int, float] = {}
        for turn in turns:
            begin = first.setdefault(turn.conversation, turn.time)
            moved = lap * span + (begin + shift) % span + (turn.time - begin)
            talk = copy * offset + turn.conversation
            found.append(Turn(moved, talk, turn.prompt, turn.history, turn.output))
    return sorted(found, key=lambda turn: turn.time), (span, 2 * span)


# ---- the fleet


@dataclass
class Rows:
    """What one model has of one conversation in the exchange, `[start, end)` in tokens."""

    start: int
    end: int
    hops: int
    size: int


@dataclass
class Fleet:
    """The exchange, and the counts of what crossed its network."""

    max_hops: int
    capacity: float
    window: tuple[float, float]
    rows: OrderedDict[tuple[int, str, bool], Rows] = field(default_factory=OrderedDict)
    size: float = 0.0
    peak: float = 0.0
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + value

    def turn(self, turn: Turn, model: str) -> None:
        talk = turn.conversation
        exact = self._touch((talk, model, False))
        own = min(exact.end, turn.history) // BLOCK * BLOCK if exact else 0
        sources = [
            (rows, other)
            for other in family(model)
            if other != model
            for lossy in (False, True)
            if (rows := self.rows.get((talk, other, lossy))) and rows.hops < self.max_hops
        ]
        end, hops, read = own, 0, own * bytes_per_token(model)
        while end < turn.history:
            here = [(r, o) for r, o in sources if r.start <= end < min(r.end, turn.history)]
            if not here:
                break
            rows, other = min(here, key=lambda pair: (pair[0].hops, -pair[0].end))
            stop = min(rows.end, turn.history) // BLOCK * BLOCK
            if stop <= end:
                break
            self._touch((talk, other, rows.hops > 0))
            read += (stop - end) * bytes_per_token(other)
            end, hops = stop, max(hops, rows.hops + 1)
        mapped = end - own
        if mapped < MIN_SPAN:
            read, mapped, hops = own * bytes_per_token(model), 0, 0
        total = (turn.prompt + turn.output) // BLOCK * BLOCK
        written = max(0, total - own) * bytes_per_token(model)
        if self.window[0] <= turn.time < self.window[1]:
            self.add("turns", 1)
            self.add("exact", own)
            self.add("mapped", mapped)
            self.add("prefilled", turn.prompt - own - mapped)
            self.add("history", turn.history)
            self.add("read_bytes", read)
            self.add("written_bytes", written)
            self.add("written_lossy_bytes", written if mapped else 0)
        self._store((talk, model, mapped > 0), Rows(own if mapped else 0, total, hops, 0), model)

    def _touch(self, key: tuple[int, str, bool]) -> Rows | None:
        rows = self.rows.get(key)
        if rows is not None:
            self.rows.move_to_end(key)
        return rows

    def _store(self, key: tuple[int, str, bool], rows: Rows, model: str) -> None:
        old = self.rows.pop(key, None)
        if old is not None:
            self.size -= old.size
            rows.start = min(rows.start, old.start) if old.end >= rows.start else rows.start
        rows.size = max(0, rows.end - rows.start) * bytes_per_token(model)
        self.rows[key] = rows
        self.size += rows.size
        while self.size > self.capacity and len(self.rows) > 1:
            _, gone = self.rows.popitem(last=False)
            self.size -= gone.size
        self.peak = max(self.peak, self.size)


def route(turns: list[Turn], switch: float, seed: int = 2) -> Iterator[tuple[Turn, str]]:
    """Which model serves each turn."""
    chance = random.Random(seed)
    names, shares = list(MODELS), [share for *_, share in MODELS.values()]
    where: dict[int, str] = {}
    for turn in turns:
        model = where.get(turn.conversation)
        if model is None:
            model = chance.choices(names, shares)[0]
        elif chance.random() < switch:
            model = chance.choice([other for other in family(model) if other != model])
        where[turn.conversation] = model
        yield turn, model


def play(
    turns: list[Turn], window: tuple[float, float], *, switch: float, max_hops: int, capacity: float
) -> dict[str, Any]:
    fleet = Fleet(max_hops, capacity, window)
    for turn, model in route(turns, switch):
        if turn.time < window[1]:
            fleet.turn(turn, model)
    seconds = window[1] - window[0]
    c = fleet.counts
    prompt = c["exact"] + c["mapped"] + c["prefilled"]
    return {
        "switch": switch,
        "max_hops": max_hops,
        "capacity_tb": None if capacity == float("inf") else capacity / 1e12,
        "turns_per_s": c["turns"] / seconds,
        "exact_of_history": c["exact"] / c["history"],
        "mapped_of_history": c["mapped"] / c["history"],
        "prefilled_of_prompt": c["prefilled"] / prompt,
        "read_gb_per_s": c["read_bytes"] / seconds / 1e9,
        "written_gb_per_s": c["written_bytes"] / seconds / 1e9,
        "written_lossy_share": c["written_lossy_bytes"] / c["written_bytes"],
        "peak_tb": fleet.peak / 1e12,
    }


# ---- formulas


def formulas(turns: list[Turn], rate: float) -> dict[str, float]:
    """Without switching and without a bound: rates from the means of the turns alone."""
    mean = mean_bytes_per_token()
    history = float(np.mean([t.history for t in turns]))
    new = float(np.mean([t.prompt + t.output - t.history for t in turns]))
    return {
        "mean_bytes_per_token": mean,
        "mean_history_tokens": history,
        "mean_new_tokens": new,
        "read_gb_per_s": rate * history * mean / 1e9,
        "written_gb_per_s": rate * new * mean / 1e9,
    }


def che(turns: list[Turn], rate: float, capacities: list[float]) -> list[dict[str, float]]:
    """Hit ratio by tokens of an exchange that forgets the least recently used, from the gaps alone.

    Everything untouched for T is gone, where T is such that what was touched within T fills
    the capacity: turns a second, times the mean of their bytes times min(gap to the next turn, T).
    """
    mean = mean_bytes_per_token()
    following: dict[int, Turn] = {}
    gaps, held, history = [], [], []
    for turn in reversed(turns):
        after = following.get(turn.conversation)
        gaps.append(after.time - turn.time if after else float("inf"))
        history.append(after.history if after else 0)
        held.append((turn.prompt + turn.output) * mean)
        following[turn.conversation] = turn
    gap, size, reuse = np.array(gaps), np.array(held), np.array(history)

    def occupied(limit: float) -> float:
        return float((size * np.minimum(gap, limit)).mean() * rate)

    found = []
    for capacity in capacities:
        low, high = 0.0, 1e6
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if occupied(middle) < capacity else (low, middle)
        hits = float(reuse[gap <= low].sum() / reuse.sum())
        found.append({"capacity_tb": capacity / 1e12, "keeps_s": low, "hit_ratio": hits})
    return found


def shape_of(turns: list[Turn]) -> dict[str, float]:
    return {
        "turns": len(turns),
        "mean_prompt": float(np.mean([t.prompt for t in turns])),
        "mean_output": float(np.mean([t.output for t in turns])),
        "history_of_prompt": sum(t.history for t in turns) / sum(t.prompt for t in turns),
        "continuing": sum(t.history > 0 for t in turns) / len(turns),
    }


def study(base: list[Turn], wanted: float) -> dict[str, Any]:
    turns, window = copies(base, wanted)
    endless = float("inf")
    result: dict[str, Any] = {"shape": shape_of(base)}
    result["unbounded"] = [
        play(turns, window, switch=switch, max_hops=hops, capacity=endless)
        for switch, hops in ((0.0, 1), (0.1, 1), (0.3, 1), (0.3, 2), (1.0, 1), (1.0, 2), (1.0, 8))
    ]
    plain = result["unbounded"][0]
    rate = plain["turns_per_s"]
    result["formulas"] = expected = formulas(base, rate)
    sizes = [rate * each * 1e12 for each in (0.1, 0.2, 0.5, 1.0, 2.0)]
    bounded = [play(turns, window, switch=0.0, max_hops=1, capacity=size) for size in sizes]
    result["bounded"] = [
        {**row, "che": foreseen} for row, foreseen in zip(bounded, che(base, rate, sizes), strict=True)
    ]
    result["check"] = {
        "read": plain["read_gb_per_s"] / expected["read_gb_per_s"],
        "written": plain["written_gb_per_s"] / expected["written_gb_per_s"],
        "hit_ratio_off_by": max(
            abs(row["exact_of_history"] - row["che"]["hit_ratio"]) for row in result["bounded"]
        ),
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--trace", type=Path, help="the conversation trace; absent: drawn from its shape")
    parser.add_argument("--rate", type=float, default=RATE, help="turns a second")
    chosen = parser.parse_args()
    result: dict[str, Any] = {"machine": machine.describe()}
    result["bytes_per_token"] = {model: bytes_per_token(model) for model in MODELS}
    drawn = from_shape(7390, 3537.0)
    result["drawn"] = study(drawn, chosen.rate)
    if chosen.trace:
        result["trace_sha256"] = hashlib.sha256(chosen.trace.read_bytes()).hexdigest()
        result["replayed"] = study(from_trace(chosen.trace), chosen.rate)
    for name in ("drawn", "replayed"):
        if name in result:
            print(name, json.dumps(result[name], indent=1))
    print(machine.write("scaling", result))


if __name__ == "__main__":
    main()
