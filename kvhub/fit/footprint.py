"""What a model takes in memory, from its files alone."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from kvhub.model.config import read_config
from kvhub.model.placement import weight_bytes


class Footprint(NamedTuple):
    """Of one model in one dtype."""

    weights: int
    """Bytes."""
    hidden: int
    """Floats a token that the widest layer's forward holds."""
    vocabulary: int


def footprint(path: Path, dtype: str) -> Footprint:
    """Errors: those of `weight_files`, `weight_headers` and `read_config`."""
    config = read_config(path).config
    inner = max(int(getattr(config, "intermediate_size", 0) or 0), 4 * config.hidden_size)
    return Footprint(
        weight_bytes(path, getattr(torch, dtype)), 3 * inner + 6 * config.hidden_size, int(config.vocab_size)
    )
