"""The budget of bytes, who goes first, and who waits for whom."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.applying import Case, make_problem

from kvhub_kernels.cpu import CpuApplier
from kvhub_kernels.resident import Resident

LONG = 30.0


def make():
    return CpuApplier(make_problem(Case(tokens=1, k=1)).weights)


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


def test_a_failed_build_costs_the_others_nothing():
    resident = Resident(budget=100)
    for name in "abc":
        resident.get(name, 30, make)

    def fail():
        assert resident.nbytes <= 30  # the room was there
        raise MemoryError

    with pytest.raises(MemoryError):
        resident.get("d", 70, fail)
    assert all(name in resident for name in "abc") and "d" not in resident


def test_one_that_is_held_is_given_while_another_is_built():
    resident = Resident(budget=100)
    held = resident.get("a", 10, make)
    began, go_on = threading.Event(), threading.Event()

    def slow():
        began.set()
        assert go_on.wait(LONG)
        return make()

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(resident.get, "b", 10, slow)
        assert began.wait(LONG)
        second = pool.submit(resident.get, "b", 10, lambda: 1 // 0)  # waits for the first
        try:
            assert pool.submit(resident.get, "a", 10, make).result(LONG) is held
            assert "c" not in resident and pool.submit(resident.get, "c", 10, make).result(LONG)
            assert not second.done()
        finally:
            go_on.set()
        assert first.result(LONG) is second.result(LONG)


def test_what_is_being_built_counts():
    resident = Resident(budget=100)
    began, go_on = threading.Event(), threading.Event()
    building = []

    def build(name):
        def one():
            building.append(name)
            assert len(building) == 1  # 60 and 60 are over the budget
            began.set()
            assert go_on.wait(LONG)
            building.remove(name)
            return make()

        return one

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(resident.get, "a", 60, build("a"))
        assert began.wait(LONG)
        second = pool.submit(resident.get, "b", 60, build("b"))
        assert building == ["a"] and not second.done()
        go_on.set()
        assert first.result(LONG) and second.result(LONG)
    assert "a" not in resident and "b" in resident


def test_what_is_being_built_makes_those_go_that_are_held():
    resident = Resident(budget=100)
    resident.get("a", 40, make)
    began, go_on = threading.Event(), threading.Event()

    def slow():
        began.set()
        assert go_on.wait(LONG)
        return make()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(resident.get, "b", 40, slow)
        try:
            assert began.wait(LONG)
            assert "a" in resident  # 40 and 40
            resident.get("c", 40, make)
            assert "a" not in resident and resident.nbytes == 40  # and 40 that are being built
        finally:
            go_on.set()
        assert first.result(LONG)
    assert resident.nbytes == 80


def test_one_in_use_is_not_built_again():
    resident = Resident(budget=100)
    resident.get("a", 60, make)
    kept = resident.find("a")
    resident.get("b", 60, make)
    assert resident.find("a") is None
    assert resident.get("a", 60, lambda: 1 // 0) is kept
    assert "b" not in resident and resident.nbytes == 60
