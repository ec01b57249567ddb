"""One job at a time on a thread of its own: moments are added while the next window runs forward.

torch lets go of Python's lock inside a product. On a GPU whose moments lie in main memory the processor works
while the GPU does; on a processor a second core does. Jobs keep their order, so the sums keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any


class Behind:
    """What a job raised, the next call raises. Used as a context, at whose end nothing runs any more.

    Where the context is left by an error, that one is raised and not the last job's.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "kvhub-moments")
        self._job: Future[Any] | None = None

    def run(self, job: Callable[..., Any], *given: Any) -> None:
        """Start `job(*given)`; waits for the one before it, so that no more than one is held."""
        self.wait()
        self._job = self._pool.submit(job, *given)

    def wait(self) -> None:
        """Until nothing runs."""
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def __enter__(self) -> Behind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._pool.shutdown()
