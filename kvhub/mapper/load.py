"""Load a mapper from a directory, the Hub or the registry."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kvhub.artifact.open import open_tensors
from kvhub.artifact.read import verify_artifact
from kvhub.errors import BadInput, Corrupt, Incompatible
from kvhub.mapper.base import Mapper
from kvhub.mapper.ridge import RidgeMapper
from kvhub.store.trust import demand
from kvhub.store.use import hold

if TYPE_CHECKING:
    from kvhub.artifact.manifest import Manifest

FAMILIES: dict[str, Callable[[Manifest, Mapping[str, Tensor]], Mapper]] = {"ridge": RidgeMapper}
"""By `Manifest.family`; a new family also needs an entry in `kvhub.artifact.tensors.FAMILIES`."""

_REPOSITORY = re.compile(r"^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}$")


def load_mapper(path_or_repo: str | Path, *, revision: str | None = None) -> Mapper:
    """The mapper in an artifact directory; else on the Hub (`org/name[@revision]`, pulled first); else
    in the registry (a digest, its beginning, or an alias).

    Every file's sha256 is checked, on every load: what computes caches is what was evaluated; and the
    signature, where there is one or this machine's trust policy asks for one.
    Errors: `NotFound`, `Corrupt`, `Incompatible`, `AccessDenied`, `Unreachable`.
    """
    directory, digest = _located(path_or_repo, revision)
    if digest is not None:
        hold(digest)  # kvhub gc leaves it alone while this process lives
    manifest = verify_artifact(directory, deep=True)
    if digest is not None and manifest.digest != digest:
        raise Corrupt(f"{directory} holds mapper {manifest.digest[:12]}, not the registered {digest[:12]}")
    demand(directory, manifest)
    family = FAMILIES.get(manifest.family)
    if family is None:
        raise Incompatible(f"unknown family {manifest.family!r}", "upgrade kvhub", code="family")
    return family(manifest, open_tensors(directory, manifest))


def locate(path_or_repo: str | Path, *, revision: str | None = None) -> Path:
    """The artifact directory that `path_or_repo` names, pulled from the Hub where it must be.

    A repository, or a revision of one, that was pulled before is found without asking the Hub:
    `kvhub pull` brings what is newer there.
    """
    return _located(path_or_repo, revision)[0]


def _located(path_or_repo: str | Path, revision: str | None) -> tuple[Path, str | None]:
    """The directory, and the digest that the registry knows it by (None: a bare directory)."""
    local = Path(path_or_repo).expanduser()
    if local.is_dir():
        if revision is not None:
            raise BadInput(f"{path_or_repo} is a directory and has no revision")
        return local.absolute(), None
    repository, separator, tag = str(path_or_repo).partition("@")
    if not _REPOSITORY.match(repository):
        return _registered(str(path_or_repo))
    from kvhub.hub.pull import here, pull

    revision = tag if separator else revision
    known = here(repository, revision)
    if known is not None:
        return Path(known.path), known.digest
    return pull(repository, revision), None


def _registered(ref: str) -> tuple[Path, str]:
    from kvhub.catalog import find

    row = find(ref)
    return Path(row.path), row.digest
