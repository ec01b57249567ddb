"""What a model takes in memory, from its files alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch

from kvhub.model.config import read_config
from kvhub.model.fingerprint import weight_files, weight_headers
from kvhub.model.placement import weight_bytes

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class Footprint(NamedTuple):
    """Of one model in one dtype."""

    weights: int
    """Bytes."""
    hidden: int
    """Floats a token that the widest layer's forward holds."""
    vocabulary: int
    unread: int = 0
    """Bytes of `weights` that are mapped from the file and stay there while no logits are computed: the
    embedding, of which a window's forward reads a few rows, and the output layer."""


def footprint(path: Path, dtype: str) -> Footprint:
    """Errors: those of `weight_files`, `weight_headers` and `read_config`."""
    config = read_config(path).config
    inner = max(int(getattr(config, "intermediate_size", 0) or 0), 4 * config.hidden_size)
    unread = sum(
        math.prod(tensor.shape) * getattr(torch, dtype).itemsize
        for tensor in weight_headers(weight_files(path)).values()
        if len(tensor.shape) == 2
        and tensor.shape[0] == config.vocab_size
        and tensor.dtype == _NAMES.get(dtype)
    )
    return Footprint(
        weight_bytes(path, getattr(torch, dtype)),
        3 * inner + 6 * config.hidden_size,
        int(config.vocab_size),
        unread,
    )
