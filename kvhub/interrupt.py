"""Ctrl-C at any moment: exit code 130 and nothing of Python's own on the terminal.

Python turns it into an exception wherever it happens to be. In the middle of an import libraries make other
errors of that, and in a callback it is printed and lost. So there are three phases: while the command line
loads and when it is through, nothing is to be cleaned up and the process just ends; in between the exception
is raised, remembered, and raised again where it was lost.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

CODE = 130
AGAIN = 0.05
"""Seconds after which an interrupt that was lost in a callback comes again."""

_working = False
_seen = _was_lost = False


def watch() -> None:
    """Take over Ctrl-C, where Python has it: not where the caller of the process wants it ignored."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        atexit.register(_ended)  # the first to be registered runs last
        sys.unraisablehook = _lost


def working() -> None:
    """From here on a command runs, which cleans up after itself."""
    global _working
    _working = True


def through() -> None:
    """The command has ended, and its exit code is known."""
    global _working
    _working = False
    # Python notes an interrupt that went through `exec` of a text (as dataclasses are made), and would kill
    # itself with SIGINT at its end; the next `exec` forgets it.
    exec("")


def seen() -> bool:
    """Whether Ctrl-C was pressed while a command ran."""
    return _seen


def lost() -> bool:
    """Whether it was, in a callback, and the command may have gone on as if nothing had happened."""
    return _was_lost


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    global _seen
    if _working:
        _seen = True
        raise KeyboardInterrupt
    os.write(2, b"Interrupted\n")
    os._exit(CODE)


def _ended() -> None:
    """Python gives up its handlers now, and the process would be killed that has done its work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _lost(what: Any) -> None:
    """An exception that nobody can catch: of a destructor or a callback."""
    global _was_lost
    if not issubclass(what.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(what)
    elif _working:
        _was_lost = True
        again = threading.Timer(AGAIN, _thread.interrupt_main)
        again.daemon = True
        again.start()
