"""The cache that stands before what is scored, for each arm.

All arms see the same tokens. The target (in the arm `source`: the source) runs the last context
token and the answer itself, on

    native          its own rows of what is before
    mapped          the source's rows of it, through the mapper
    wrong-document  the mapped rows of other text, at the same positions
    empty           nothing
    source          the source's own rows: the source answers alone
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvhub.errors import BadInput
from kvhub.evaluation.arms import map_rows
from kvhub.evaluation.evidence import ARMS, Arm
from kvhub.evaluation.inject import KvRows, run
from kvhub.mapper.base import Mapper

if TYPE_CHECKING:
    from kvhub.model.load import LoadedModel


class Caches:
    """Rows before the last context token, by arm; those of the last context are kept.

    exact_prefix: first rows native in the mapped arms; None: as many as the mapper's manifest asks for.
    other: token ids `[n]` that the arm `wrong-document` maps instead, cut or repeated to length.
    """

    def __init__(
        self,
        mapper: Mapper,
        source: LoadedModel,
        target: LoadedModel,
        *,
        exact_prefix: int | None = None,
        other: Tensor | None = None,
    ) -> None:
        self.mapper, self.source, self.target = mapper, source, target
        self.exact_prefix = mapper.manifest.exact_prefix if exact_prefix is None else exact_prefix
        self.other = other
        self.context = min(source.identity.rope.context, target.identity.rope.context)
        self._known: tuple[Arm, tuple[int, ...], KvRows] | None = None

    def model(self, arm: Arm) -> LoadedModel:
        """Who runs the last context token and the answer."""
        return self.source if arm == "source" else self.target

    def rows(self, arm: Arm, tokens: Sequence[int]) -> KvRows | None:
        """The rows of `tokens` in one arm; None where there are none."""
        if arm not in ARMS:
            raise BadInput(f"there is no arm {arm!r}", f"choose from {', '.join(ARMS)}")
        if not tokens or arm == "empty":
            return None
        key = tuple(tokens)
        if self._known is None or self._known[:2] != (arm, key):
            self._known = (arm, key, self._compute(arm, torch.tensor(tokens)))
        return self._known[2]

    def _compute(self, arm: Arm, tokens: Tensor) -> KvRows:
        if arm == "native":
            return own_rows(self.target, tokens)
        if arm == "source":
            return own_rows(self.source, tokens)
        read = tokens
        if arm == "wrong-document":
            if self.other is None or not len(self.other):
                raise BadInput("the arm wrong-document needs other text")
            read = self.other.repeat(-(-len(tokens) // len(self.other)))[: len(tokens)]
        mapped = map_rows(self.mapper, own_rows(self.source, read), self.source.identity, self.target)
        count = min(self.exact_prefix, len(tokens))
        return mapped.with_exact_prefix(own_rows(self.target, tokens[:count]), count) if count else mapped


def own_rows(model: LoadedModel, tokens: Tensor) -> KvRows:
    """A model's own rows of `tokens` (`[n]` int64) from position 0."""
    return KvRows.of(run(model.model, tokens, keep=1)[1], len(tokens))
