"""One closed-form recipe as a point that a search may move, solved from moments that are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvhub.fit.moments import PairMoments
from kvhub.fit.recipes.groupwise import solve_groupwise
from kvhub.fit.ridge import Regularization, Support
from kvhub.fit.selection import top_layers
from kvhub.fit.settings import FitSettings
from kvhub.fit.solve import Solved, solve_pair
from kvhub.model.identity import Geometry


@dataclass(frozen=True)
class Choice:
    """What may differ between candidates; the defaults are plain ridge."""

    k: int
    regularization: Regularization = Regularization()  # noqa: RUF009 - frozen
    support: Support = "full"
    off_head: float = 1.0
    """Penalty of source heads that are not the matched one, relative to its own (full support)."""
    stretch_keys: float = 0.0
    stretch_values: float = 0.0
    normalise: bool = False
    """Keys through the target's k_norm."""

    def label(self) -> str:
        """For people and for the manifest: what differs from plain ridge."""
        parts = [
            f"{self.support} k={self.k} r={self.regularization.value:g}",
            *([f"off-head x{self.off_head:g}"] if self.off_head != 1 else []),
            *([f"keys stretched {self.stretch_keys:g}"] if self.stretch_keys else []),
            *([f"values stretched {self.stretch_values:g}"] if self.stretch_values else []),
            *(["keys normalised"] if self.normalise else []),
        ]
        return ", ".join(parts)

    def flops(self, source: Geometry, target: Geometry) -> int:
        """To apply it to one token."""
        width = self.k * (source.features if self.support == "full" else source.head_dim)
        return 4 * width * target.num_layers * target.features


def solve_choice(
    choice: Choice,
    moments: PairMoments,
    scores: Tensor,
    source: Geometry,
    target: Geometry,
    settings: FitSettings,
    norms: Tensor | None = None,
) -> Solved:
    """scores: of `layer_scores`. norms: for a choice that normalises. Errors: those of `solve_pair`."""
    layers: Sequence[Sequence[int]] = top_layers(scores, choice.k)
    settings = replace(
        settings,
        k=choice.k,
        support=choice.support,
        stretch=choice.stretch_keys,
        stretch_values=choice.stretch_values,
    )
    norms = norms if choice.normalise else None
    if choice.off_head == 1.0:
        solved = solve_pair(moments, source, target, layers, choice.regularization, settings, norms)
    else:
        solved = solve_groupwise(
            moments, source, target, layers, choice.regularization, settings, norms, factor=choice.off_head
        )
    return replace(solved, support=choice.support, recipe=choice.label())
