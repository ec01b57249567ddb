from __future__ import annotations

import threading
import time

import pytest

from kvhub.fit.behind import Behind


def test_jobs_keep_their_order_and_never_meet():
    log, running = [], []

    def job(number):
        running.append(number)
        assert running == [number]
        time.sleep(0.01)
        log.append((number, threading.current_thread() is threading.main_thread()))
        running.clear()

    with Behind() as behind:
        for number in range(5):
            behind.run(job, number)
    assert log == [(number, False) for number in range(5)]


def test_the_caller_goes_on_meanwhile():
    gate = threading.Event()
    with Behind() as behind:
        behind.run(gate.wait, 30)
        gate.set()  # only a caller that was not held gets here
        behind.wait()


@pytest.mark.parametrize("then", ["run", "wait", "leave"])
def test_a_failure_is_told_once(then):
    with pytest.raises(ZeroDivisionError), Behind() as behind:
        behind.run(lambda: 1 // 0)
        if then != "leave":
            getattr(behind, then)(*[print] if then == "run" else [])
            pytest.fail("not told")


def test_an_error_of_the_caller_ends_the_thread_and_is_the_one_raised():
    before, done = threading.active_count(), []

    def job():
        time.sleep(0.05)
        done.append(1)
        raise ZeroDivisionError

    with pytest.raises(KeyError, match="the caller's"), Behind() as behind:
        behind.run(job)
        raise KeyError("the caller's")
    assert done and threading.active_count() == before
