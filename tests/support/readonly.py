"""Run something as a user who may read a directory and write nothing in it."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

Answer = TypeVar("Answer")
NOBODY = 65534


@contextmanager
def open_directory() -> Iterator[Path]:
    """A directory that every user can reach: pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(prefix="kvhub-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def as_reader(root: Path, function: Callable[[], Answer]) -> Answer:
    """The answer of `function` in a forked process for which everything below `root` is read-only.

    Root writes anywhere, so it becomes somebody else; modules that it may then not read must be loaded.
    """
    modes = {path: path.stat().st_mode for path in [root, *root.rglob("*")]}
    for path in modes:
        path.chmod(0o555 if path.is_dir() else 0o444)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            found: tuple[bool, object] = (True, function())
        except BaseException:
            found = (False, traceback.format_exc())
        os.write(writing, pickle.dumps(found))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    for path, mode in modes.items():
        path.chmod(mode & 0o7777)
    good, answer = pickle.loads(data)
    assert good, answer
    return answer
