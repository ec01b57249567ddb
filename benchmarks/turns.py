"""Ten turns that switch models, under every policy of reuse; results/turns-NAME.json.

    python -m benchmarks.turns models/small models/large --name shipped [--home KVHUB_HOME]

Offline, with the same mappers and rules as serving (blocks of 64, own rows before mapped ones, hop limit,
exact first tokens, native tail, healing between turns), and transformers instead of SGLang: a live server
gives no whole distributions. That a server's mapped cache gives the log-probabilities of this path to 1e-4
is a test of the suite. Text is held out; every turn is a message and an answer (112 and 16 tokens),
teacher-forced.

At each turn the model in use is compared with itself on its own native cache of the same tokens, on the
answer's positions: KL(native || switched) in nats, and whether the first tokens agree. Intervals: 95 %
bootstrap over conversations.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import machine
from kvhub.mapper.base import Mapper, SourceRows
from kvhub.mapper.cache import as_layer, as_rows
from kvhub.model.load import LoadedModel, load_model

BLOCK, MIN_SPAN = 64, 64


@dataclass(frozen=True)
class Shape:
    """Tokens of the first message, of each later one, and of each answer."""

    first: int = 250
    message: int = 112
    answer: int = 16

    def length(self, turns: int) -> int:
        return self.first + self.answer + (turns - 1) * (self.message + self.answer)


@dataclass(frozen=True)
class Policy:
    """How a server reuses; the names are those of the serving settings."""

    max_hops: int = 1
    exact_prefix: int = 0
    native_tail: int = 0
    heal: bool = False
    reuse: bool = True
    """False: each model uses its own rows alone, which is what switching costs without kvhub."""


POLICIES: dict[str, Policy] = {
    "own rows alone": Policy(reuse=False),
    "1 hop": Policy(),
    "2 hops": Policy(max_hops=2),
    "1 hop, sink 4": Policy(exact_prefix=4),
    "9 hops": Policy(max_hops=9),
    "1 hop, tail 64": Policy(native_tail=64),
    "1 hop, sink 4, tail 64": Policy(exact_prefix=4, native_tail=64),
    "2 hops, sink 4": Policy(max_hops=2, exact_prefix=4),
    "1 hop, healed": Policy(heal=True),
    "1 hop, sink 4, healed": Policy(exact_prefix=4, heal=True),
    "2 hops, sink 4, tail 64, healed": Policy(max_hops=2, exact_prefix=4, native_tail=64, heal=True),
}


@dataclass
class Held:
    """A model's rows of a conversation: `[batch, heads, tokens, dim]` per layer, and hops per token."""

    keys: list[Tensor]
    values: list[Tensor]
    hops: Tensor

    @property
    def tokens(self) -> int:
        return len(self.hops)

    def copy(self) -> Held:
        return Held(list(self.keys), list(self.values), self.hops.clone())


class Side:
    """One model and the mapper to it."""

    def __init__(self, loaded: LoadedModel, mapper: Mapper) -> None:
        self.loaded, self.mapper = loaded, mapper
        self.layers = loaded.identity.geometry.num_layers

    def empty(self) -> Held:
        return Held([], [], torch.zeros(0, dtype=torch.int64))

    def compute(self, held: Held, ids: Tensor, stop: int, *, last: int = 0) -> tuple[Held, Tensor | None]:
        """Rows up to `stop` computed on `held`; log-probabilities of the `last` positions, if wanted."""
        from transformers import DynamicCache

        start = held.tokens
        if start >= stop:
            return held, None
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(held.keys, held.values, strict=True)):
            cache.update(keys, values, layer)
        with torch.inference_mode():
            found = self.loaded.model(
                ids[:, start:stop],
                past_key_values=cache,
                position_ids=torch.arange(start, stop).expand(len(ids), -1),
                use_cache=True,
                logits_to_keep=max(last, 1),
            )
        hops = torch.full((stop - start,), int(held.hops.max()) if start else 0)
        rows = Held(
            [layer.keys for layer in cache.layers],
            [layer.values for layer in cache.layers],
            torch.cat([held.hops, hops]),
        )
        return rows, found.logits.float().log_softmax(-1) if last else None

    def map(self, held: Held, other: Held, stop: int, source: LoadedModel) -> Held:
        """Rows `[held.tokens, stop)` mapped from the other model's."""
        start = held.tokens
        batch = len(other.keys[0])
        rows = SourceRows(
            as_rows([k[:, :, start:stop] for k in other.keys], torch.device("cpu")),
            as_rows([v[:, :, start:stop] for v in other.values], torch.device("cpu")),
            torch.arange(start, stop).repeat(batch),
            source.identity.rope,
        )
        dtype = self.loaded.model.dtype
        keys, values = [], []
        for layer in range(self.layers):
            pair = [as_layer(side.to(dtype), batch) for side in self.mapper.map_layer(layer, rows)]
            have = (held.keys[layer], held.values[layer]) if start else None
            keys.append(torch.cat([have[0], pair[0]], 2) if have else pair[0])
            values.append(torch.cat([have[1], pair[1]], 2) if have else pair[1])
        return Held(keys, values, torch.cat([held.hops, other.hops[start:stop] + 1]))


@dataclass
class Outcome:
    """Per turn and conversation; what the receiver did is the same for all conversations."""

    kl: list[Tensor]
    top1: list[Tensor]
    mapped: list[int]
    computed: list[int]
    hops: list[int]


def switch(
    sides: Sequence[Side], ids: Tensor, turns: int, shape: Shape, policy: Policy, native: list[Any]
) -> Outcome:
    """Hold a batch of conversations `[batch, tokens]` under one policy."""
    held = [side.empty() for side in sides]
    outcome = Outcome([], [], [], [], [])
    end = shape.first
    for turn in range(turns):
        me, other = turn % 2, 1 - turn % 2
        mine, theirs = held[me], held[other]
        before = mine.tokens
        mapped = 0
        if policy.reuse and theirs.tokens > mine.tokens:
            if mine.tokens < policy.exact_prefix:
                mine, _ = sides[me].compute(mine, ids, policy.exact_prefix)
            stop = _reach(mine, theirs, policy)
            if stop - before >= MIN_SPAN and stop > mine.tokens:
                mapped = stop - mine.tokens
                mine = sides[me].map(mine, theirs, stop, sides[other].loaded)
        computed = end + shape.answer - before - mapped
        exact, reference = native[turn]
        if policy.reuse:
            rows, found = sides[me].compute(mine, ids, end + shape.answer - 1, last=shape.answer)
        else:  # its own rows and what it computes on them are the reference
            rows, found = exact, reference
        assert found is not None
        outcome.kl.append((reference.exp() * (reference - found)).sum(-1).clamp_min(0).mean(-1))
        outcome.top1.append((reference.argmax(-1) == found.argmax(-1)).float().mean(-1))
        outcome.mapped.append(mapped)
        outcome.computed.append(computed)
        outcome.hops.append(int(rows.hops.max()))
        held[me] = exact.copy() if policy.heal else rows
        end += shape.message + shape.answer
    return outcome


def _reach(mine: Held, theirs: Held, policy: Policy) -> int:
    """Where the mapped span ends: whole blocks of the other's rows that have hops to spare."""
    stop = theirs.tokens // BLOCK * BLOCK
    block = mine.tokens // BLOCK
    while block * BLOCK < stop:
        if int(theirs.hops[max(mine.tokens, block * BLOCK) : (block + 1) * BLOCK].max()) >= policy.max_hops:
            break
        block += 1
    return max(min(block * BLOCK, stop) - policy.native_tail, mine.tokens)


def references(sides: Sequence[Side], ids: Tensor, turns: int, shape: Shape) -> list[Any]:
    """Of each turn, the model's native rows and log-probabilities on the same tokens."""
    held = [side.empty() for side in sides]
    found = []
    end = shape.first
    for turn in range(turns):
        me = turn % 2
        rows, logs = sides[me].compute(held[me], ids, end + shape.answer - 1, last=shape.answer)
        held[me] = rows
        found.append((rows, logs))
        end += shape.message + shape.answer
    return found


def windows(tokenizer: Any, texts: list[Path], count: int, length: int, skip: float) -> Tensor:
    """`[count, length]` token ids, spread over the last part of each text (what no fit has seen)."""
    rows: list[list[int]] = []
    for index, path in enumerate(texts):
        wanted = count // len(texts) + (index < count % len(texts))
        text = path.read_text(errors="replace")
        text = text[int(len(text) * skip) :]
        ids = tokenizer(text[: 12 * wanted * length])["input_ids"]
        step = max((len(ids) - length) // max(wanted, 1), 1)
        assert step >= length // 2, f"{path} is too short"
        rows += [ids[i * step : i * step + length] for i in range(wanted)]
    return torch.tensor(rows)


def interval(values: np.ndarray, draws: int = 2000) -> dict[str, float]:
    """Mean with a 95 % bootstrap interval over conversations."""
    picks = np.random.default_rng(0).integers(0, len(values), (draws, len(values)))
    low, high = np.quantile(values[picks].mean(axis=1), (0.025, 0.975))
    return {
        "mean": round(float(values.mean()), 5),
        "low": round(float(low), 5),
        "high": round(float(high), 5),
    }


def mapper_between(home: str, source: LoadedModel, target: LoadedModel, named: str | None) -> Mapper:
    """The mapper of a home that was fitted for exactly these two models."""
    folders = [Path(named)] if named else sorted(Path(home, "mappers").iterdir())
    for folder in folders:
        manifest = json.loads((folder / "manifest.json").read_text())
        revisions = (manifest["source"]["revision"], manifest["target"]["revision"])
        if revisions == (source.identity.revision, target.identity.revision):
            return Mapper.from_pretrained(folder)
    raise SystemExit(f"{home} has no mapper {source.identity.name} -> {target.identity.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("small")
    parser.add_argument("large")
    parser.add_argument("--name", required=True, help="results/turns-NAME.json")
    parser.add_argument("--home", required=True, help="KVHUB_HOME with mappers both ways")
    parser.add_argument("--up", help="folder of the mapper small -> large, where there are several")
    parser.add_argument("--down", help="folder of the mapper large -> small")
    parser.add_argument("--text", type=Path, nargs="+", default=[Path("demo/text/wikipedia.txt")])
    parser.add_argument("--skip", type=float, default=0.8, help="share of each text that is left out")
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument(
        "--tokens", type=int, nargs=3, default=[250, 112, 16], metavar=("FIRST", "MESSAGE", "ANSWER")
    )
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    small, large = (load_model(path, dtype) for path in (arguments.small, arguments.large))
    up = mapper_between(arguments.home, small, large, arguments.up)
    down = mapper_between(arguments.home, large, small, arguments.down)
    sides = (Side(small, down), Side(large, up))
    shape = Shape(*arguments.tokens)
    length = shape.length(arguments.turns)
    ids = windows(small.tokenizer, arguments.text, arguments.conversations, length, arguments.skip)
    gathered: dict[str, list[Outcome]] = {name: [] for name in arguments.policies}
    started = time.monotonic()
    path = None
    for first in range(0, len(ids), arguments.batch):
        batch = ids[first : first + arguments.batch]
        native = references(sides, batch, arguments.turns, shape)
        for name in arguments.policies:
            gathered[name].append(switch(sides, batch, arguments.turns, shape, POLICIES[name], native))
        done = first + len(batch)
        print(f"{done}/{len(ids)} conversations, {time.monotonic() - started:.0f} s", flush=True)
        path = machine.write(f"turns-{arguments.name}", report(arguments, gathered, done, (up, down)))
    print(path)


def report(
    arguments: argparse.Namespace, gathered: dict[str, list[Outcome]], done: int, pair: tuple[Mapper, Mapper]
) -> dict[str, Any]:
    """What is written: every policy, every turn."""
    rows = {}
    for name, outcomes in gathered.items():
        kl, top1 = (
            np.stack(
                [torch.cat([getattr(o, key)[t] for o in outcomes]).numpy() for t in range(arguments.turns)]
            )
            for key in ("kl", "top1")
        )
        rows[name] = {
            "all_switched_turns": {"kl": interval(kl[1:].mean(0)), "top1": interval(top1[1:].mean(0))},
            "last_turn": {"kl": interval(kl[-1]), "top1": interval(top1[-1])},
            "computed_tokens": sum(outcomes[0].computed[1:]),
            "mapped_tokens": sum(outcomes[0].mapped),
            "turns": [
                {
                    "model": ("small", "large")[t % 2],
                    "kl": interval(kl[t]),
                    "top1": interval(top1[t]),
                    "mapped": outcomes[0].mapped[t],
                    "computed": outcomes[0].computed[t],
                    "hops": outcomes[0].hops[t],
                }
                for t in range(arguments.turns)
            ],
        }
    return {
        "what": "KL(native || switched) and top-1 by turn; mean over answers, 95 % over conversations",
        "offline": "same mappers and rules as serving, transformers instead of SGLang",
        "small": Path(arguments.small).name,
        "large": Path(arguments.large).name,
        "mappers": {
            name: {
                "digest": m.manifest.digest[:12],
                "k": m.manifest.k,
                "exact_prefix": m.manifest.exact_prefix,
            }
            for name, m in zip(("up", "down"), pair, strict=True)
        },
        "dtype": arguments.dtype,
        "conversations": done,
        "tokens_of_first_message_message_answer": arguments.tokens,
        "text": [path.name for path in arguments.text],
        "machine": machine.describe(),
        "policies": rows,
    }


if __name__ == "__main__":
    main()
