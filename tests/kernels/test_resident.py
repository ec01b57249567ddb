"""The budget of bytes, and who goes first."""

from __future__ import annotations

import pytest
import torch
from support.applying import Case, make_problem

from kvhub_kernels.cpu import CpuApplier
from kvhub_kernels.resident import Resident


def test_least_recently_used_goes_first():
    weights = make_problem(Case(tokens=1, k=1)).weights
    size = weights.nbytes
    resident = Resident(budget=2 * size + 5)
    built = []

    def get(name):
        def build():
            assert resident.nbytes + size <= resident.budget  # room was made before
            built.append(name)
            return CpuApplier(weights)

        return resident.get(name, size, build)

    first = get("a")
    assert first.nbytes == size
    get("b")
    assert get("a") is first
    get("c")
    assert "b" not in resident and "a" in resident and "c" in resident
    assert built == ["a", "b", "c"] and resident.nbytes == 2 * size
    resident.drop("a")
    resident.drop("a")
    assert resident.nbytes == size


def test_what_cannot_fit_evicts_nothing():
    weights = make_problem(Case(tokens=1, k=1)).weights
    resident = Resident(budget=weights.nbytes)
    resident.get("a", weights.nbytes, lambda: CpuApplier(weights))
    with pytest.raises(ValueError, match="does not fit"):
        resident.get("b", weights.nbytes + 1, lambda: CpuApplier(weights, torch.bfloat16))
    assert "a" in resident


def test_a_failed_build_holds_nothing():
    resident = Resident(budget=100)
    with pytest.raises(ZeroDivisionError):
        resident.get("a", 50, lambda: 1 // 0)
    assert "a" not in resident and resident.nbytes == 0
