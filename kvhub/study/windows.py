"""Windows for studies to choose recipes on; what is held out is cut as `kvhub eval` cuts it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from kvhub.errors import BadInput
from kvhub.fit.calibration import load_corpora
from kvhub.fit.text import windows


def tuning_windows(
    paths: Sequence[Path], tokenizer: Any, *, count: int, length: int, after: int
) -> dict[str, Tensor]:
    """`count` windows of the calibration side that come after its first `after` windows of `length`.

    For choosing recipes: they are never held out, and a fit on no more than `after` windows a text does
    not use them. Errors: `BadInput` where a text is too short.
    """
    found: dict[str, Tensor] = {}
    for number, corpus in enumerate(load_corpora(paths, tokenizer=tokenizer)):
        share = count // len(paths) + (number < count % len(paths))
        cut = windows(corpus.calibration, tokenizer, length=length, limit=share, start=after)
        if len(cut) < share:
            raise BadInput(f"{corpus.name} has no {share} windows after the first {after}", "give more text")
        found[corpus.name] = cut
    return found
