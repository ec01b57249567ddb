"""The complete RoPE description of a model, read from its live rotary module."""

from __future__ import annotations

import torch
from torch import Tensor

from kvhub.model.identity import RopeSpec
from kvhub_kernels.rotary import RotaryTable


def rotary_table(rope: RopeSpec, positions: Tensor) -> RotaryTable:
    """cos and sin of `rope` at `positions` (`[tokens]` int64), on their device."""
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32, device=positions.device)
    return RotaryTable.build(frequencies, positions, pairing=rope.pairing, scale=rope.attention_factor)
