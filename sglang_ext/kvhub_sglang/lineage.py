"""What lies under every row of the pool that is in the lossy namespace, slot by slot.

A slot is the only name of a row that cannot mean another one: the same tokens may be
mapped in one request and computed in the next, branch in the middle of a block, or
be inserted by whoever came first. A slot is noted before SGLang's tree can show it to
anyone else. Slots of the exact namespace are never asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvhub.exchange import EXACT, Lineage


class RowLineages:
    """Lineage of each slot of one pool.

    slots: how many slots the pool has. Slots are given as int tensors on any device.
    """

    def __init__(self, slots: int) -> None:
        self._number = torch.zeros(slots, dtype=torch.int32)
        self._known: list[Lineage] = [EXACT]
        self._numbers: dict[tuple[int, tuple[str, ...]], int] = {(0, ()): 0}

    def note(self, slots: Tensor, lineage: Lineage) -> None:
        """These rows now have this lineage."""
        name = (lineage.hops, tuple(lineage.mappers))
        if name not in self._numbers:
            self._numbers[name] = len(self._known)
            self._known.append(lineage)
        self._number[slots.to("cpu", torch.int64)] = self._numbers[name]

    def under(self, slots: Tensor) -> Lineage:
        """The lineage of a row computed on all of these."""
        merged = EXACT
        for number in torch.unique(self._of(slots)).tolist():
            merged = merged.merge(self._known[number])
        return merged

    def exact(self, slots: Tensor) -> Tensor:
        """`[len(slots)]` bool: which rows are this model's own, computed on its own."""
        return self._of(slots) == 0

    def _of(self, slots: Tensor) -> Tensor:
        return self._number[slots.to("cpu", torch.int64)]
