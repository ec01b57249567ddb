"""Conversations that move to the target at every turn: F1 of its answers, turn by turn.

At turn t the history - the story, all questions so far and the reference answers before - stands in
the cache of each arm; the target writes the answer. Drift at turn t is F1(native) - F1(mapped)
(arXiv 2608.03893, the CoQA experiment). References rather than written answers stand in the history,
so that the arms see the same tokens.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvhub.errors import BadInput
from kvhub.evaluation.bootstrap import Bootstrap, Estimate
from kvhub.evaluation.evidence import Arm
from kvhub.tasks.caches import Caches
from kvhub.tasks.lm import MappedLM
from kvhub.tasks.local import read_text
from kvhub.tasks.scores import require_arms

MAX_NEW_TOKENS = 32
STOPS = ("\nQ:", "\n\n", "Q:")


@dataclass(frozen=True)
class Conversation:
    """A story, and questions with all accepted answers to each."""

    story: str
    questions: list[str]
    answers: list[list[str]]

    def history(self, turn: int) -> str:
        """What stands before the answer of `turn` (from 0)."""
        asked = [
            f"Q: {question}\n\nA: {accepted[0]}\n\n"
            for question, accepted in zip(self.questions[:turn], self.answers[:turn], strict=True)
        ]
        return f"{self.story}\n\n{''.join(asked)}Q: {self.questions[turn]}\n\nA:"


@dataclass(frozen=True)
class Turn:
    """F1 of one turn over all conversations that have it."""

    turn: int
    n: int
    f1: dict[Arm, Estimate]
    drift: Estimate
    """F1(native) - F1(mapped), paired."""


def read_conversations(path: Path, *, limit: int | None = None) -> list[Conversation]:
    """CoQA's own JSON (`{"data": [...]}`), or one such object a line. Errors: `NotFound`, `BadInput`."""
    text = read_text(path)
    try:
        whole = json.loads(text) if path.suffix == ".json" else None
        items = whole["data"] if whole is not None else [json.loads(x) for x in text.split("\n") if x.strip()]
        found = [_conversation(item) for item in items][:limit]
    except (AttributeError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise BadInput(
            f"{path} holds no conversations as CoQA writes them",
            'give objects with "story", "questions" and "answers", lists of {"input_text": ...}',
        ) from None
    if not found:
        raise BadInput(f"{path} holds no conversations", "give a file that has some")
    return found


def _conversation(item: Any) -> Conversation:
    def texts(turns: Any) -> list[str]:
        rows = turns["input_text"] if isinstance(turns, dict) else [turn["input_text"] for turn in turns]
        if not all(isinstance(row, str) for row in rows):
            raise ValueError("not text")
        return list(rows)

    story, questions, answers = item["story"], texts(item["questions"]), texts(item["answers"])
    more = [texts(turns) for turns in (item.get("additional_answers") or {}).values()]
    if not isinstance(story, str) or not questions or len(questions) != len(answers):
        raise ValueError("questions and answers differ")
    return Conversation(
        story,
        questions,
        [[answer, *(m[t] for m in more if t < len(m))] for t, answer in enumerate(answers)],
    )


def run_conversations(
    conversations: Sequence[Conversation],
    caches: Caches,
    arms: Sequence[Arm] = ("native", "source", "mapped"),
    *,
    turns: int = 10,
    seed: int = 0,
    progress: Callable[[Arm, int], None] = lambda arm, done: None,
) -> list[Turn]:
    """The first `turns` turns; a conversation counts up to its own last one.

    Errors: `BadInput` where there is no conversation or the arms lack native or mapped.
    """
    if not conversations:
        raise BadInput("there are no conversations")
    require_arms(arms)
    found = np.full((len(arms), len(conversations), turns), np.nan)
    for row, arm in enumerate(arms):
        model = MappedLM(caches, arm)
        for number, talk in enumerate(conversations):
            for turn in range(min(turns, len(talk.questions))):
                written = model.decode(model.tok_encode(talk.history(turn)), STOPS, MAX_NEW_TOKENS)
                found[row, number, turn] = max(f1(written, accepted) for accepted in talk.answers[turn])
            progress(arm, number + 1)
    table = []
    for turn in range(turns):
        there = ~np.isnan(found[0, :, turn])
        if not there.any():
            break
        scores = dict(zip(arms, found[:, there, turn], strict=True))
        draw = Bootstrap([int(there.sum())], seed=seed)
        means = {arm: draw.mean(values) for arm, values in scores.items()}
        table.append(Turn(turn + 1, int(there.sum()), means, draw.mean(scores["native"] - scores["mapped"])))
    return table


def f1(written: str, accepted: str) -> float:
    """F1 of words without case, punctuation and articles, as CoQA and SQuAD score answers."""
    one, two = _words(written), _words(accepted)
    if not one or not two:
        return float(one == two)
    common = sum((Counter(one) & Counter(two)).values())
    return 2 * common / (len(one) + len(two))


def _words(text: str) -> list[str]:
    plain = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()
