"""What a fit may be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvhub.errors import BadInput
from kvhub.fit.ridge import PAPER, Regularization, Support
from kvhub.model.identity import Geometry


@dataclass(frozen=True)
class FitSettings:
    """Defaults are the paper's where it has one: 500 x 1,024 tokens, every 4th (arXiv 2608.03893, 3.1)."""

    k: int = 8
    regularization: Regularization = field(default_factory=Regularization)
    support: Support = "full"
    sequences: int = 500
    length: int = 1024
    stride: int = 4
    exact_prefix: int = 0
    store_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seed: int = 0
    created: str | None = None
    """ISO 8601 time to record; None is now. Part of the digest: fix it to get the same digest twice."""

    def __post_init__(self) -> None:
        if min(self.sequences, self.length, self.stride) < 1:
            raise BadInput("--sequences, --length and --stride must be at least 1")
        if not 0 <= self.exact_prefix < self.length:
            raise BadInput(
                f"--exact-prefix {self.exact_prefix} leaves no row of a window of {self.length} tokens"
            )

    def features(self, source: Geometry) -> int:
        """Width of one regression: `k * H_s * D_s`, or `k * D_s` for head-local."""
        return self.k * (source.features if self.support == "full" else source.head_dim)


def parse_regularization(text: str) -> Regularization:
    """`paper`, or a number of at least 0 relative to the Gram's mean diagonal. Errors: `BadInput`."""
    if text == "paper":
        return PAPER
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise BadInput(f"--lambda {text} is neither `paper` nor a number of at least 0")
    return Regularization(value)
