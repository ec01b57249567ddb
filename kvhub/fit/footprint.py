"""What a model takes in memory, from its files alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from kvhub.model.config import read_config
from kvhub.model.fingerprint import weight_files, weight_headers

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    numbers = sum(math.prod(tensor.shape) for tensor in weight_headers(weight_files(path)).values())
    inner = max(int(getattr(config, "intermediate_size", 0) or 0), 4 * config.hidden_size)
    return Footprint(_ITEMSIZE[dtype] * numbers, 3 * inner + 6 * config.hidden_size, int(config.vocab_size))
