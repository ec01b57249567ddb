"""Memory that nothing has written is NaN: a kernel that leaves a hole, or reads one, fails."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    empty = torch.empty

    def poisoned_empty(*size, **options):
        tensor = empty(*size, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-77)

    monkeypatch.setattr(torch, "empty", poisoned_empty)
