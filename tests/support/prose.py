"""Deterministic text for fits in tests: many different documents that share no template."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = [
    *("river", "mill", "bridge", "stone", "boat", "float", "morning", "miller", "gate", "wheel", "turn"),
    *("number", "def", "return", "under", "past", "over", "light", "water", "東京", "Ärger", "naïve", "144"),
    *("89", "quickly", "slow", "opened", "began", "house", "tree", "night", "day", "small", "large", "blue"),
]


def documents(count: int, *, words: int = 60, seed: int = 0) -> list[str]:
    """`count` documents of `words` random words."""
    chosen = random.Random(seed)
    return [" ".join(chosen.choices(WORDS, k=words)) + "." for _ in range(count)]


def write_text(path: Path, count: int = 200, *, words: int = 60, seed: int = 0) -> Path:
    """A UTF-8 file of `documents`, blank lines between them."""
    path.write_text("\n\n".join(documents(count, words=words, seed=seed)), encoding="utf-8")
    return path
