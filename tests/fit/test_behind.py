from __future__ import annotations

import threading
import time

import pytest

from kvhub.fit.behind import Behind


def test_jobs_keep_their_order_and_never_meet():
    behind, log, running = Behind(), [], []

    def job(number):
        running.append(number)
        assert running == [number]
        time.sleep(0.01)
        log.append((number, threading.current_thread() is threading.main_thread()))
        running.clear()

    for number in range(5):
        behind.run(job, number)
    behind.close()
    assert log == [(number, False) for number in range(5)]


def test_the_caller_goes_on_meanwhile():
    behind, gate = Behind(), threading.Event()
    behind.run(gate.wait, 30)
    gate.set()  # only a caller that was not held gets here
    behind.wait()
    behind.close()


@pytest.mark.parametrize("then", ["run", "wait", "close"])
def test_a_failure_is_told_once(then):
    behind = Behind()
    behind.run(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        getattr(behind, then)(*[print] if then == "run" else [])
    behind.close()
