"""Adam with a warm-up and a cosine, and every choice a function of (seed, step) alone.

So a run that goes on from a checkpoint draws what an uninterrupted one would have drawn.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvhub.errors import BadInput

SAMPLE, SAMPLE_WINDOWS = 2048, 20
"""Rows that means, directions and errors are taken from, and of how many windows, about."""
CLIP = 1.0
"""Largest norm of all gradients of a step together."""


@dataclass(frozen=True)
class Distill:
    """How a correction is distilled; rate and batch are what tuning windows of the shipped pair liked."""

    steps: int = 60
    rate: float = 3e-3
    """Peak learning rate, in units of `Correction.step`."""
    batch: int = 2
    """Windows a step."""
    tail: int = 64
    """Tokens that the target reads on the mapped cache, at most."""
    places: int = 2
    """Different prefixes of each window."""
    windows: int = 80
    """Windows that are used, the first ones; their captures are read again and again."""
    checks: int = 4
    """How often the tuning windows are asked; the best of these, and the start, is kept."""
    if_possible: bool = False
    """Nobody asked for it: left out where the text or the windows are too short for it."""

    def __post_init__(self) -> None:
        counts = self.steps, self.batch, self.places, self.windows, self.checks
        if min(counts) < 1 or self.tail < 2 or not self.rate > 0:
            raise BadInput("--distill needs at least one step")


def demand_tail(how: Distill, windows: Sequence[Tensor], exact_prefix: int) -> int:
    """Tokens of a tail: `how.tail`, or less in short windows. Errors: `BadInput` where there is no room."""
    shortest = min(len(window) for window in windows)
    tail = min(how.tail, shortest // 4)
    if tail < 2 or shortest - tail <= exact_prefix:
        raise BadInput("--distill needs longer windows", "use a longer --length, or --distill 0")
    return tail


def optimiser(trained: Sequence[Tensor], rate: float) -> torch.optim.Adam:
    """Adam; the learning rate is set at each step by `rate_at`."""
    return torch.optim.Adam(list(trained), lr=rate, betas=(0.9, 0.99), eps=1e-10)


def rate_at(settings: Distill, step: int) -> float:
    """5 % linear warm-up, then a cosine to a twentieth of the peak."""
    warm = max(1, settings.steps // 20)
    if step < warm:
        return settings.rate * (step + 1) / warm
    along = (step - warm) / max(1, settings.steps - warm)
    return settings.rate * (0.05 + 0.95 * (1 + math.cos(math.pi * along)) / 2)


def seeded(*numbers: int) -> torch.Generator:
    """A generator that depends on `numbers` alone."""
    digest = hashlib.sha256(",".join(map(str, numbers)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
