"""Small files, written whole or not at all; and what a failed write means to a person."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvhub.errors import AccessDenied, BadInput, KvhubError

ROOM = "free some space, or write somewhere else; nothing half-written is left"


def is_full(error: BaseException) -> bool:
    """Whether a disk, a quota or the largest file that may be has been reached."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_denied(error: BaseException) -> bool:
    """Whether rights forbid it, or the disk may only be read."""
    return isinstance(error, PermissionError) or (isinstance(error, OSError) and error.errno == errno.EROFS)


def unwritable(path: Path, error: OSError, hint: str = "check who owns it") -> KvhubError:
    """What to say where `path` could not be written. hint: for whom may not write there."""
    if is_full(error):
        return KvhubError(f"cannot write {path}: the disk is full", ROOM)
    if is_denied(error):
        return AccessDenied(f"{path} may not be written", hint)
    return KvhubError(f"cannot write {path}: {error.strerror or error}")


@contextmanager
def writing(path: Path, hint: str = "check who owns it") -> Iterator[None]:
    """`OSError`s of a write as `AccessDenied` or `KvhubError`, one line each."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error, hint) from None


def write_bytes(path: Path, data: bytes, *, by: Path | None = None) -> None:
    """Replace a small file in one step. Errors: `AccessDenied`, `KvhubError`.

    by: the directory of the unfinished file, on the same disk, where `path`'s own must not show one.
    """
    # Not made from the name of `path`, which may be as long as a name can be; of this writer alone.
    temporary = (by or path.parent) / f".writing-{os.getpid()}-{secrets.token_hex(4)}"
    with writing(path):
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def check_output(path: Path) -> None:
    """Refuse a place where `write_output` could not put a file, before the work for it is done.

    A link, a pipe, a device or a directory is never replaced. Errors: `BadInput`, `AccessDenied`.
    """
    try:
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                raise BadInput(f"{path} is there and is not a regular file", "give another place")
        except FileNotFoundError:
            pass
        near = next(parent for parent in path.absolute().parents if parent.exists())
    except OSError as error:
        raise _unusable(path, error) from None
    if not near.is_dir():
        raise BadInput(f"cannot write {path}: {near} is not a directory")
    if not os.access(near, os.W_OK | os.X_OK):
        raise AccessDenied(f"{near} may not be written")


def write_output(path: Path, data: bytes) -> None:
    """Put a file where a person asked for it, with the directories above it, in one step.

    Errors: as `check_output` and `write_bytes`.
    """
    check_output(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(path, error) from None
    write_bytes(path, data)


def _unusable(path: Path, error: OSError) -> KvhubError:
    kind = AccessDenied if isinstance(error, PermissionError) else BadInput
    return kind(f"cannot write {path}: {error.strerror or error}")
