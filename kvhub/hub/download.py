"""Getting files of a repository at one commit: in parallel, a shard as the unit of retry."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.hub.remote import Remote, download

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PARALLEL = 4
PATIENCE = 5.0
"""Seconds that a failed pull waits for downloads under way; what they leave is swept by the next one."""

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def download_all(
    hub: HfApi, remote: Remote, names: Sequence[str], staged: Path, *, total: int, progress: Progress | None
) -> None:
    """Several files at once; the first failure ends it. total: bytes, for `progress`."""
    work: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    for name in names:
        work.put(name)

    def worker() -> None:
        while not stop.is_set():
            try:
                name = work.get_nowait()
            except queue.Empty:
                return
            try:
                download(hub, remote, name, staged)
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)

    # Daemons: Ctrl-C must not wait for half a gigabyte; the staging directory goes all the same.
    threads = [
        threading.Thread(target=worker, name=f"kvhub-pull-{number}", daemon=True)
        for number in range(min(PARALLEL, len(names)))
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in names:
            error = _next(done, staged, total, progress)
            if error is not None:
                raise error
    except Exception:
        stop.set()
        deadline = time.monotonic() + PATIENCE
        for thread in threads:  # so that nothing is written any more when the caller cleans up
            thread.join(max(0.0, deadline - time.monotonic()))
        raise
    finally:
        stop.set()


def _next(
    done: queue.SimpleQueue[BaseException | None], staged: Path, total: int, progress: Progress | None
) -> BaseException | None:
    """The outcome of the next file, reporting bytes on disk in the meantime."""
    while True:
        try:
            return done.get(timeout=0.2)
        except queue.Empty:
            if progress is not None:
                progress(min(_written(staged), total), total)


def _written(staged: Path) -> int:
    size = 0
    for path in staged.rglob("*"):
        try:
            size += path.lstat().st_size
        except FileNotFoundError:
            continue
    return size
