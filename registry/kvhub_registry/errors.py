"""What can go wrong with a registry. `kvhub.catalog` turns each into the command line's errors."""

from __future__ import annotations


class RegistryError(Exception):
    """Base: `message` is one line and never holds a password, `hint` is the next step."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class BadAddress(RegistryError):
    """The database URL cannot be used."""


class NotRegistered(RegistryError):
    """No mapper, or no database, answers to this name."""


class Behind(NotRegistered):
    """The database is of an older kvhub, and was opened only to read."""


class Ambiguous(RegistryError):
    """A reference fits several mappers; `candidates` are their digests."""

    def __init__(self, message: str, hint: str, candidates: tuple[str, ...]) -> None:
        super().__init__(message, hint)
        self.candidates = candidates


class Denied(RegistryError):
    """The file system or the database server refuses access."""


class Unavailable(RegistryError):
    """The server does not answer, or another writer holds the lock too long."""


class Full(RegistryError):
    """The disk of the database is full; nothing was changed."""


class Damaged(RegistryError):
    """The file is not a database, is torn, or is not a kvhub registry."""


class TooNew(RegistryError):
    """A newer kvhub wrote this database."""
