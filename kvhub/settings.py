"""Where kvhub keeps things, from the environment.

    KVHUB_HOME           data directory (default: the platform's user data directory)
    KVHUB_DATABASE_URL   the registry (default: sqlite in KVHUB_HOME)
    KVHUB_DEBUG          1: tracebacks on errors

Serving has its own settings file: `kvhub_sglang.settings`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from platformdirs import user_data_path

from kvhub.errors import BadInput

_SQLITE = "sqlite:///"


@dataclass(frozen=True)
class Settings:
    """Resolved settings of this process."""

    home: Path
    database_url: str
    debug: bool

    @classmethod
    def load(cls) -> Settings:
        """Read the environment; creates nothing. Errors: `BadInput` for a home that cannot be a directory."""
        home = Path(os.environ.get("KVHUB_HOME") or user_data_path("kvhub")).expanduser().absolute()
        _demand_directory(home)
        url = os.environ.get("KVHUB_DATABASE_URL") or sqlite_url(home / "registry.db")
        return cls(home, url, os.environ.get("KVHUB_DEBUG") == "1")

    @property
    def database_file(self) -> Path | None:
        """The registry's file; None where it is on a server."""
        url = self.database_url
        name = url.removeprefix(_SQLITE)
        if not url.startswith(_SQLITE) or "?" in name or name in ("", ":memory:"):  # refused when opened
            return None
        return Path(unquote(name, errors="surrogateescape")).expanduser()

    @property
    def mappers(self) -> Path:
        """One directory per mapper, named by its digest."""
        return self.home / "mappers"

    @property
    def cache(self) -> Path:
        """Things that can be computed again, such as weight fingerprints."""
        return self.home / "cache"


def sqlite_url(path: Path) -> str:
    """The URL of a SQLite file: a `?` or `%` in its path is a part of the name and nothing else."""
    return _SQLITE + quote(os.fsencode(path))


def demand_endpoint() -> None:
    """Refuse (`BadInput`) an HF_ENDPOINT that is no address: some let the import of the client fail."""
    given = os.environ.get("HF_ENDPOINT", "")
    if not given:
        return
    try:
        parts = urlsplit(given)
        good = parts.scheme in ("http", "https") and _is_host(parts.hostname or "") and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not (good and given.isascii() and given.isprintable() and " " not in given):
        # A password may stand in it, before the last "@".
        plain = "".join(letter if letter.isprintable() else "?" for letter in given.rpartition("@")[2][:160])
        plain = f"***@{plain}" if "@" in given else plain
        raise BadInput(f"HF_ENDPOINT is {plain!r}, which is no address of a Hub", "https://HOST, or unset it")


def _is_host(name: str) -> bool:
    """A name that can be looked up (RFC 1035, 2.3.4), or an address."""
    return len(name) <= 253 and all(1 <= len(label) <= 63 for label in name.removesuffix(".").split("."))


def _demand_directory(home: Path) -> None:
    """Refuse (`BadInput`) a home that is a file, or that would be below one."""
    for place in (home, *home.parents):
        if place.is_dir():
            return
        if os.path.lexists(place):
            what = "is not a directory" if place == home else f"cannot be made: {place} is not a directory"
            raise BadInput(f"KVHUB_HOME {home} {what}", "set KVHUB_HOME to a directory, or to a new place")
