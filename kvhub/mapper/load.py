"""Load a mapper from a directory, the Hub or the registry."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kvhub.artifact.open import open_tensors
from kvhub.artifact.read import verify_artifact
from kvhub.errors import BadInput, Incompatible
from kvhub.mapper.base import Mapper
from kvhub.mapper.ridge import RidgeMapper

if TYPE_CHECKING:
    from kvhub.artifact.manifest import Manifest

FAMILIES: dict[str, Callable[[Manifest, Mapping[str, Tensor]], Mapper]] = {"ridge": RidgeMapper}
"""By `Manifest.family`; a new family also needs an entry in `kvhub.artifact.tensors.FAMILIES`."""

_REPOSITORY = re.compile(r"^[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}$")


def load_mapper(path_or_repo: str | Path, *, revision: str | None = None) -> Mapper:
    """The mapper in an artifact directory; else on the Hub (`org/name[@revision]`, pulled first); else
    in the registry (a digest, its beginning, or an alias).

    Every file's sha256 is checked, on every load: what computes caches is what was evaluated.
    Errors: `NotFound`, `Corrupt`, `Incompatible`, `AccessDenied`, `Unreachable`.
    """
    directory = locate(path_or_repo, revision=revision)
    manifest = verify_artifact(directory, deep=True)
    family = FAMILIES.get(manifest.family)
    if family is None:
        raise Incompatible(f"unknown family {manifest.family!r}", "upgrade kvhub", code="family")
    return family(manifest, open_tensors(directory, manifest))


def locate(path_or_repo: str | Path, *, revision: str | None = None) -> Path:
    """The artifact directory that `path_or_repo` names, pulled from the Hub where it must be."""
    local = Path(path_or_repo).expanduser()
    if local.is_dir():
        if revision is not None:
            raise BadInput(f"{path_or_repo} is a directory and has no revision")
        return local.absolute()
    repository, separator, tag = str(path_or_repo).partition("@")
    if _REPOSITORY.match(repository):
        from kvhub.hub.pull import pull

        return pull(repository, tag if separator else revision)
    from kvhub.catalog import find

    return Path(find(str(path_or_repo)).path)
