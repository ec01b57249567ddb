"""Mappers that are in the store while the registry does not know them. Light: `kvhub list` imports it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

from kvhub.settings import Settings
from kvhub_registry.names import is_digest_prefix


def lost(settings: Settings, known: Iterable[str]) -> str:
    """One line where mappers are in the store that the registry does not name, else nothing.

    known: digests of all that it names. After the registry was lost or emptied everything else would look
    as if there had never been a mapper.
    """
    try:
        names = set(os.listdir(settings.mappers))  # noqa: PTH208 - ten thousand of them
    except OSError:
        return ""
    count = sum(len(name) == 64 and is_digest_prefix(name) for name in names.difference(known))
    if not count:
        return ""
    one = count == 1
    said = f"{count} mapper{'' if one else 's'} in {settings.mappers} {'is' if one else 'are'} not registered"
    before = misplaced(settings)
    moved = f" (an earlier kvhub kept this home's registry at {before})" if before else ""
    return f"{said}: kvhub register puts {'it' if one else 'them'} back{moved}"


def misplaced(settings: Settings) -> Path | None:
    """Where kvhub 0.1 put the registry of a home with `?` or `%` in its path, if it is still there."""
    right = settings.home / "registry.db"
    wrong = Path(unquote(str(right).partition("?")[0]))
    return wrong if wrong != right and settings.database_file == right and wrong.is_file() else None
