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

from platformdirs import user_data_path


@dataclass(frozen=True)
class Settings:
    """Resolved settings of this process."""

    home: Path
    database_url: str
    debug: bool

    @classmethod
    def load(cls) -> Settings:
        """Read the environment; creates nothing."""
        home = Path(os.environ.get("KVHUB_HOME") or user_data_path("kvhub")).expanduser().absolute()
        url = os.environ.get("KVHUB_DATABASE_URL") or f"sqlite:///{home / 'registry.db'}"
        return cls(home, url, os.environ.get("KVHUB_DEBUG") == "1")

    @property
    def database_file(self) -> Path | None:
        """The registry's file; None where it is on a server."""
        scheme = "sqlite:///"
        url = self.database_url
        return Path(url.removeprefix(scheme)) if url.startswith(scheme) else None

    @property
    def mappers(self) -> Path:
        """One directory per mapper, named by its digest."""
        return self.home / "mappers"

    @property
    def cache(self) -> Path:
        """Things that can be computed again, such as weight fingerprints."""
        return self.home / "cache"
