"""`org/name[/folder][@revision]`: where a mapper is on the Hub.

A repository holds one mapper at its root, or several in folders, or both. A folder may also be called
by the digest of the mapper in it (six digits at least).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvhub.errors import BadInput

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,254}", re.ASCII)
_FOLDER = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95}){0,3}", re.ASCII)
_ONE = "give one of them"
_RESERVED = {"assets"}
"""Folders of a mapper's own."""


@dataclass(frozen=True)
class Reference:
    """One mapper's place. `subfolder` is "" at the root of the repository."""

    repo_id: str
    subfolder: str = ""
    revision: str | None = None

    @property
    def place(self) -> str:
        """`org/name` or `org/name/folder`: how registry, lists and messages call it."""
        return f"{self.repo_id}/{self.subfolder}" if self.subfolder else self.repo_id

    def path(self, name: str) -> str:
        """A file's path in the repository."""
        return f"{self.within}{name}"

    @property
    def within(self) -> str:
        """What the paths of this mapper's files begin with."""
        return f"{self.subfolder}/" if self.subfolder else ""


def parse(reference: str, *, revision: str | None = None, subfolder: str = "") -> Reference:
    """Read a reference; revision and subfolder may also be given apart, but not twice. Errors: `BadInput`."""
    whole, separator, named = reference.partition("@")
    if separator and revision is not None:
        raise BadInput(f"{_short(reference)} names a revision, and {_short(revision)} is another", _ONE)
    namespace, _, rest = whole.partition("/")
    name, _, inner = rest.partition("/")
    if inner and subfolder:
        raise BadInput(f"{_short(reference)} names a folder, and {_short(subfolder)} is another", _ONE)
    repo_id = f"{namespace}/{name}"
    if not _REPOSITORY.fullmatch(repo_id) or ".." in repo_id or "--" in repo_id or whole.endswith("/"):
        raise BadInput(
            f"{_short(reference)} is not a Hub repository", "write org/name, or org/name/folder@revision"
        )
    wanted = named if separator else revision
    if wanted is not None and not is_revision(wanted):
        raise BadInput(f"{_short(wanted)} is not a revision", "a branch, a tag or a commit")
    return Reference(repo_id, folder(inner or subfolder), wanted)


def is_revision(text: str) -> bool:
    """Whether a text can name a version: of what pull takes after `@`, and push as a tag."""
    odd = ".." in text or "//" in text or text.endswith(("/", ".", ".lock"))
    return _REVISION.fullmatch(text) is not None and not odd


def folder(text: str) -> str:
    """A folder's name, checked; "" is the root. Errors: `BadInput`."""
    parts = text.split("/")
    if text and (not _FOLDER.fullmatch(text) or ".." in text or _RESERVED & set(parts)):
        raise BadInput(
            f"{_short(text)} cannot be a mapper's folder",
            "letters, digits, '.', '_' and '-', at most four deep, not 'assets'",
        )
    return text


def is_folder(text: str) -> bool:
    """Whether a text can be a mapper's folder ("" is the root)."""
    try:
        return folder(text) == text
    except BadInput:
        return False


def is_place(text: str) -> bool:
    """Whether a text reads as `org/name[/folder][@revision]`."""
    try:
        parse(text)
    except BadInput:
        return False
    return True


def _short(text: str) -> str:
    """A reference for a message, which nobody reads to the end where it is long."""
    return repr(text if len(text) <= 200 else f"{text[:199]}\N{HORIZONTAL ELLIPSIS}")
