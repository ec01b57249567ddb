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
    """Bytes of `weights` that are mapped from the file and stay there while no logits are computed."""


_UNREAD = 0.5
"""Of the embedding and the output layer. Windows read some rows, and the system maps their neighbours too:
80 windows of 512 tokens brought 38 % of the embeddings of two Qwen2.5-Coder models into memory."""


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
        int(_UNREAD * unread),
    )
