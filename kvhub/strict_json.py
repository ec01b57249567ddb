"""JSON that somebody else may have written: bounded, no duplicate keys, no traceback."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvhub.errors import AccessDenied, Corrupt, NotFound

if TYPE_CHECKING:
    from pydantic import ValidationError


def read_bounded(path: Path, *, limit: int, follow_symlinks: bool = False) -> bytes:
    """The bytes of a regular file of at most `limit` bytes.

    Errors: `NotFound`; `Corrupt` for a symlink, a device or pipe, or a larger file; `AccessDenied`.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_symlinks else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise NotFound(f"{path} does not exist", "check the path") from None
    except PermissionError:
        raise AccessDenied(f"{path} may not be read", "check who owns it") from None
    except OSError as error:  # ELOOP: a symlink; ENXIO: a socket
        raise Corrupt(f"{path} is not a regular file ({error.strerror})") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Corrupt(f"{path} is not a regular file")
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor, not a path
        data = file.read(limit + 1)
    if len(data) > limit:
        raise Corrupt(f"{path} is larger than {limit} bytes")
    return data


def parse_object(data: bytes, what: str, *, constants: bool = False) -> dict[str, Any]:
    """The JSON object in `data`; `what` names it in errors (`Corrupt`).

    constants: NaN and Infinity may be in it, which Python's own writer makes and JSON does not have.
    """
    try:
        known = float if constants else _no_constant
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=known)
    except _Duplicate as error:
        raise Corrupt(f"{what}: key {error.key!r} appears twice") from None
    except _NoNumber as error:
        hint = f"{error} is no number in JSON: write one, or fetch the file again"
        raise Corrupt(f"{what}: not valid JSON: it holds {error}", hint) from None
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else "not valid JSON"
        if "integer string conversion" in str(error):
            reason = "not valid JSON: a number has too many digits"
        raise Corrupt(f"{what}: {reason}") from None
    if not isinstance(value, dict):
        raise Corrupt(f"{what}: not a JSON object")
    return value


def shown(text: object, limit: int = 160) -> str:
    """`text` for a one-line message: what is not printable (newlines, terminal escapes) becomes `?`."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(text)[:limit])


def first_fault(error: ValidationError) -> str:
    """Where and what the first fault of a record is, in one line without the input itself."""
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(shown(part, 40) for part in fault["loc"])
    return f"{where}: {shown(fault['msg'])}" if where else shown(fault["msg"])


class _Duplicate(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key[:64]


class _NoNumber(Exception):
    """NaN, Infinity or -Infinity: Python's own writer makes them."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _Duplicate(key)
        result[key] = value
    return result


def _no_constant(name: str) -> Any:
    raise _NoNumber(name)
