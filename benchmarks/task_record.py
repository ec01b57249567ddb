"""What a model leaves of a task's contexts on disk, its rows and its own answers, so that it runs once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.task_items import Block, TaskSet
from kvhub.evaluation.bootstrap import Array
from kvhub.evaluation.inject import KvRows, run
from kvhub.model.identity import ModelIdentity
from kvhub.model.load import LoadedModel
from kvhub.study.measure import Candidate


@dataclass(frozen=True)
class Recorded:
    """One block: rows of the examples, of each context but its last token, and the model's own answers."""

    examples: KvRows | None
    """None: there are none."""
    items: list[KvRows]
    answers: list[Array]


class Records:
    """One file for each block and model, named by both digests; written whole."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def complete(self, model: ModelIdentity, task: TaskSet) -> bool:
        """Whether all blocks are there."""
        return all(self._place(model, block).exists() for block in task.blocks)

    def record(self, model: LoadedModel, task: TaskSet) -> None:
        """Run what is not there yet."""
        for block in task.blocks:
            place = self._place(model.identity, block)
            if not place.exists():
                save_file(_pack(_run_block(model, block)), place.with_suffix(".writing"))
                place.with_suffix(".writing").replace(place)

    def load(self, model: ModelIdentity, block: Block) -> Recorded:
        """What `record` wrote."""
        return _unpack(load_file(self._place(model, block)), len(block.items))

    def answers(self, model: ModelIdentity, task: TaskSet) -> list[Array]:
        """The model's own log-likelihoods, item by item."""
        return [found for block in task.blocks for found in self.load(model, block).answers]

    def empty(self, model: LoadedModel, task: TaskSet) -> list[Array]:
        """Its answers with nothing before the last context token; kept as well."""
        found = []
        for block in task.blocks:
            place = self._place(model.identity, block).with_suffix(".empty.npy")
            if not place.exists():
                rows = [
                    score(model, [], len(block.examples) + len(i.context), i.context[-1], i.answers)
                    for i in block.items
                ]
                np.save(place, np.concatenate(rows))
            found += _items(block, np.load(place))
        return found

    def mapped(
        self,
        candidate: Candidate,
        source: ModelIdentity,
        target: LoadedModel,
        task: TaskSet,
        *,
        key: str,
        wrong: bool = False,
    ) -> list[Array]:
        """The target's answers on the source's rows through a mapper; wrong: rows of the next block.

        key: names the mapper; what it answered before is not run again.
        """
        found = []
        for number, block in enumerate(task.blocks):
            name = f"{source.digest[:16]}-{key}-{'wrong' if wrong else 'mapped'}"
            place = self._place(target.identity, block).with_suffix(f".{name}.npy")
            if place.exists():
                found += _items(block, np.load(place))
                continue
            answers = []
            other = task.blocks[(number + 1) % len(task.blocks)] if wrong else block
            served = list(_served(candidate, self.load(source, other), len(other.examples)))
            for index, item in enumerate(block.items):
                rows = served[index % len(served)]
                length = sum(len(part) for part in rows) + 1
                answers.append(score(target, rows, length, item.context[-1], item.answers))
            np.save(place, np.concatenate(answers))
            found += answers
        return found

    def _place(self, model: ModelIdentity, block: Block) -> Path:
        return self.directory / f"{model.digest[:16]}-{block.digest[:16]}.safetensors"


def _items(block: Block, answers: Array) -> list[Array]:
    return list(np.split(answers, np.cumsum([len(item.answers) for item in block.items])[:-1]))


def _served(candidate: Candidate, recorded: Recorded, start: int) -> Iterator[list[KvRows]]:
    """Mapped parts of each context; the examples are mapped once."""
    first = [] if recorded.examples is None else [candidate.map(recorded.examples)]
    for item in recorded.items:
        parts = [*first, *([candidate.map(item, start)] if len(item) else [])]
        for part in parts:
            part.check_finite("the mapped cache")
        yield parts


def score(model: LoadedModel, parts: list[KvRows], length: int, last: int, answers: list[list[int]]) -> Array:
    """Log-likelihoods (nats) of all answers in one batch, float64 `[options]`.

    parts: rows of the context's first `length - 1` tokens, or nothing. Shorter answers are padded at their
    end, which nothing before it sees.
    """
    rows = [[last, *answer[:-1]] for answer in answers]
    if all(len(row) == 1 for row in rows):
        rows = rows[:1]  # all answers are told from the same logits
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([row + [last] * (longest - len(row)) for row in rows])
    positions = torch.arange(length - 1, length - 1 + longest)[None].expand(len(rows), -1)
    cache = None
    if parts:
        cache = _joined(parts).to_cache(model.model)
        cache.batch_repeat_interleave(len(rows))
    with torch.inference_mode():
        out = model.model(
            input_ids=tokens.to(model.model.device),
            position_ids=positions.to(model.model.device),
            past_key_values=cache,
            use_cache=True,
        )
        likely = torch.log_softmax(out.logits.double(), dim=-1).cpu()
    found = []
    for number, answer in enumerate(answers):
        line = likely[number % len(rows), torch.arange(len(answer)), torch.tensor(answer)]
        found.append(float(line.sum()))
    return np.array(found)


def _joined(parts: list[KvRows]) -> KvRows:
    layers = range(len(parts[0].keys))
    return KvRows(
        tuple(torch.cat([part.keys[n] for part in parts]) for n in layers),
        tuple(torch.cat([part.values[n] for part in parts]) for n in layers),
    )


def _run_block(model: LoadedModel, block: Block) -> Recorded:
    start = len(block.examples)
    examples = None
    if start:
        examples = KvRows.of(run(model.model, torch.tensor(block.examples), keep=1)[1], start)
    items, answers = [], []
    for item in block.items:
        body = item.context[:-1]
        rows = _nothing(model.identity, model.model.dtype)
        if body:
            _, cache = run(model.model, torch.tensor(body), start=start, rows=examples, keep=1)
            every = KvRows.of(cache, start + len(body))
            rows = KvRows(tuple(k[start:] for k in every.keys), tuple(v[start:] for v in every.values))
        items.append(rows)
        parts = [part for part in (examples, rows) if part is not None and len(part)]
        answers.append(score(model, parts, start + len(item.context), item.context[-1], item.answers))
    return Recorded(examples, items, answers)


def _nothing(model: ModelIdentity, dtype: torch.dtype) -> KvRows:
    shape = model.geometry
    rows = tuple(
        torch.empty(0, shape.num_kv_heads, shape.head_dim, dtype=dtype) for _ in range(shape.num_layers)
    )
    return KvRows(rows, rows)


def _pack(recorded: Recorded) -> dict[str, Tensor]:
    found = {}
    spans = [("examples", recorded.examples), *((f"item.{n}", rows) for n, rows in enumerate(recorded.items))]
    for name, rows in spans:
        if rows is not None:
            found[f"{name}.keys"] = torch.stack(rows.keys).cpu().contiguous()
            found[f"{name}.values"] = torch.stack(rows.values).cpu().contiguous()
    for number, answers in enumerate(recorded.answers):
        found[f"item.{number}.answers"] = torch.from_numpy(answers)
    return found


def _unpack(found: dict[str, Tensor], items: int) -> Recorded:
    def rows(name: str) -> KvRows:
        return KvRows(found[f"{name}.keys"].unbind(0), found[f"{name}.values"].unbind(0))

    return Recorded(
        rows("examples") if "examples.keys" in found else None,
        [rows(f"item.{n}") for n in range(items)],
        [found[f"item.{n}.answers"].numpy() for n in range(items)],
    )
