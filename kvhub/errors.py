"""Every error a user can meet, with its stable exit code.

    KvhubError                 1  something failed that is none of the below
    ├── BadInput               2  the arguments or the text given cannot be used
    ├── NotFound               3  model, revision, mapper, file or repo is absent
    ├── AccessDenied           4  the Hub or the file system says no
    ├── Unreachable            5  the network or the Hub did not answer
    ├── Corrupt                6  a digest, tensor, manifest or database is damaged
    └── Incompatible           7  this pair, revision or geometry cannot work

130 is Ctrl-C. The message is one line and says what is wrong; `hint` says what
to do next. The command line prints both and no traceback (set KVHUB_DEBUG=1 for
one).
"""

from __future__ import annotations


class KvhubError(Exception):
    """Base of all kvhub errors: `message` is one line, `hint` the next step."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class BadInput(KvhubError):
    """An argument, text or setting that cannot be used."""

    exit_code = 2


class NotFound(KvhubError):
    """A model, revision, mapper, file or repository that is not there."""

    exit_code = 3


class AccessDenied(KvhubError):
    """401, 403, a gated repository, or a directory that may not be written."""

    exit_code = 4


class Unreachable(KvhubError):
    """The Hub or the network did not answer."""

    exit_code = 5


class Corrupt(KvhubError):
    """A digest, tensor, manifest, database or answer of the Hub that is damaged or hostile."""

    exit_code = 6


class Incompatible(KvhubError):
    """A model, pair, revision or geometry that cannot work; `code` names why."""

    exit_code = 7

    def __init__(self, message: str, hint: str = "", *, code: str = "incompatible") -> None:
        super().__init__(message, hint)
        self.code = code
