"""Items of `task_points.py`: examples that a block of items shares, the context of each, and its answers.

    letters   the question with its options behind A, B, ..., answered by a letter: the form of MMLU
    options   "Question: ... Answer:" and the options themselves, a character's likelihood: the form of ARC
    next      which of four texts goes on? Held-out text, and the beginnings of what follows other windows

The first two read the JSONL files of `kvhub tasks`; `next` reads text, for models too small for questions.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvhub.errors import BadInput
from kvhub.evaluation.text import held_out_windows
from kvhub.tasks.local import read_items

CONTINUATION = 8
"""Tokens of a continuation (`next`)."""
CHOICES = 4


@dataclass(frozen=True)
class Item:
    """Token ids; the context is the block's examples and then `context`, of at least one token."""

    context: list[int]
    answers: list[list[int]]
    lengths: list[int]
    """What the log-likelihood of an answer is divided by."""
    gold: int


@dataclass(frozen=True)
class Block:
    """Items after the same examples."""

    examples: list[int]
    items: list[Item]

    @property
    def digest(self) -> str:
        """sha256 of all token ids."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()


@dataclass(frozen=True)
class TaskSet:
    """One task; blocks are what intervals resample."""

    name: str
    blocks: list[Block]

    @property
    def items(self) -> list[Item]:
        """All of them, in order."""
        return [item for block in self.blocks for item in block.items]

    @property
    def chance(self) -> float:
        """Accuracy of guessing."""
        return float(np.mean([1 / len(item.answers) for item in self.items]))


def parse(text: str, tokenizer: Any, *, items: int, block: int, shots: int, prefix: int) -> TaskSet:
    """`FORM:NAME=FILE[@FIRST]`; FIRST: items of the file that are passed over.

    items: how many; block: how many share `shots` examples; prefix: tokens of `next`.
    """
    head, equals, rest = text.partition("=")
    path, _, first = rest.partition("@")
    form, colon, name = head.partition(":")
    if not equals or not colon or form not in ("letters", "options", "next"):
        raise BadInput(f"{text!r} is no task", "FORM:NAME=FILE[@FIRST], FORM one of letters, options, next")
    if form == "next":
        return TaskSet(name, continuations(Path(path), tokenizer, items=items, prefix=prefix))
    every = read_items(Path(path))[int(first or 0) :]
    return TaskSet(name, questions(every, form, tokenizer, items, block, shots))


def questions(
    items: Sequence[dict[str, Any]], form: str, tokenizer: Any, count: int, block: int, shots: int
) -> list[Block]:
    """The first `count` items; examples come from those after them, others for every block."""
    blocks = -(-count // block)
    if len(items) < count + blocks * shots:
        raise BadInput(f"{len(items)} items are too few", f"{count + blocks * shots} are needed")

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    found = []
    for number in range(blocks):
        first = count + number * shots
        shown = "".join(f"{_asked(one, form)}{_answers(one, form)[one['gold']]}\n\n"
                        for one in items[first : first + shots])  # fmt: skip
        mine = items[number * block : min((number + 1) * block, count)]
        found.append(Block(encode(shown) if shown else [], [_item(one, form, encode) for one in mine]))
    return found


def _item(one: dict[str, Any], form: str, encode: Any) -> Item:
    answers = _answers(one, form)
    lengths = [1 if form == "letters" else len(option) for option in one["options"]]
    return Item(encode(_asked(one, form)), [encode(answer) for answer in answers], lengths, one["gold"])


def _asked(one: dict[str, Any], form: str) -> str:
    if form == "options":
        return f"Question: {one['question']}\nAnswer:"
    letters = string.ascii_uppercase[: len(one["options"])]
    lines = [f"{letter}. {option}" for letter, option in zip(letters, one["options"], strict=True)]
    return "\n".join([one["question"].strip(), *lines, "Answer:"])


def _answers(one: dict[str, Any], form: str) -> list[str]:
    if form == "options":
        return [f" {option}" for option in one["options"]]
    return [f" {letter}" for letter in string.ascii_uppercase[: len(one["options"])]]


def continuations(path: Path, tokenizer: Any, *, items: int, prefix: int) -> list[Block]:
    """`prefix` tokens of held-out text, its next tokens, and those of three other windows; a block each."""
    windows = next(
        iter(held_out_windows([path], tokenizer, count=items, length=prefix + CONTINUATION).values())
    ).tolist()
    if len(windows) < CHOICES:
        raise BadInput(f"{path} has too little held-out text", f"{CHOICES} windows are needed")
    found = []
    for number, window in enumerate(windows):
        gold = number % CHOICES
        others = [windows[(number + step) % len(windows)][prefix:] for step in range(1, CHOICES)]
        answers = [*others[:gold], window[prefix:], *others[gold:]]
        item = Item(window[:prefix], answers, [1] * CHOICES, gold)
        found.append(Block([], [item]))
    return found
