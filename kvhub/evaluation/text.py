"""Held-out windows for an evaluation: the side of the text that no fit has seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from kvhub.errors import BadInput
from kvhub.fit.calibration import load_corpora
from kvhub.fit.text import windows


def held_out_windows(paths: Sequence[Path], tokenizer: Any, *, count: int, length: int) -> dict[str, Tensor]:
    """`{file name: [n, length] int64}`: `count` windows in all, shared out evenly over the files.

    Only documents on the held-out side of the split that `kvhub fit` makes are cut, without those
    that repeat the calibration side. A file with less text gives what it has.
    Errors: those of `read_documents`; `BadInput` where a file has not two windows.
    """
    if count < 2 * len(paths):
        raise BadInput(f"{count} windows are too few for {len(paths)} texts", "use at least 2 a text")
    found: dict[str, Tensor] = {}
    for number, corpus in enumerate(load_corpora(paths, tokenizer=tokenizer)):
        share = count // len(paths) + (number < count % len(paths))
        cut = windows(corpus.held_out, tokenizer, length=length, limit=share)
        if len(cut) < 2:
            raise BadInput(
                f"{corpus.name}: its held-out tenth gives {len(cut)} windows of {length} tokens, not 2",
                f"give at least {20 * length} tokens of text, in several documents, or a shorter --prefix",
            )
        found[corpus.name] = cut
    return found
