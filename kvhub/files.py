"""Small files, written whole or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from kvhub.errors import AccessDenied, BadInput, KvhubError


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a small file in one step. Errors: `AccessDenied`, `KvhubError`."""
    # Not made from the name of `path`, which may be as long as a name can be; of this writer alone.
    temporary = path.parent / f".writing-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except PermissionError:
        raise AccessDenied(f"{path.parent} may not be written") from None
    except OSError as error:
        raise KvhubError(f"cannot write {path}: {error.strerror or error}") from None


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
