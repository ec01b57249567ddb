"""Load a mapper from a directory, the Hub or the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kvhub.artifact.manifest import NORMALISED
from kvhub.artifact.open import open_tensors
from kvhub.artifact.read import verify_artifact
from kvhub.catalog import directory_of, files_of, find
from kvhub.errors import BadInput, Corrupt, Incompatible
from kvhub.mapper.base import Mapper
from kvhub.mapper.mlp import MlpMapper
from kvhub.mapper.ridge import RidgeMapper
from kvhub.store.trust import demand
from kvhub.store.use import hold

if TYPE_CHECKING:
    from kvhub.artifact.manifest import Manifest

FAMILIES: dict[str, Callable[[Manifest, Mapping[str, Tensor]], Mapper]] = {
    "mlp": MlpMapper,
    "ridge": RidgeMapper,
    NORMALISED: RidgeMapper,
}
"""By `Manifest.family`; a new family also needs an entry in `kvhub.artifact.tensors.FAMILIES`."""


def load_mapper(path_or_repo: str | Path, *, revision: str | None = None, subfolder: str = "") -> Mapper:
    """The mapper in an artifact directory; else on the Hub (`org/name[/folder][@revision]`, pulled first);
    else in the registry (a digest, its beginning, or an alias).

    subfolder: of a repository with several mappers, its folder or its digest.
    Every file's sha256 is checked, on every load: what computes caches is what was evaluated; and the
    signature, where there is one or this machine's trust policy asks for one.
    Errors: `NotFound`, `Corrupt`, `Incompatible`, `AccessDenied`, `Unreachable`.
    """
    directory, digest = _located(path_or_repo, revision, subfolder)
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


def locate(path_or_repo: str | Path, *, revision: str | None = None, subfolder: str = "") -> Path:
    """The artifact directory that `path_or_repo` names, pulled from the Hub where it must be.

    A repository, or a revision of one, that was pulled before is found without asking the Hub:
    `kvhub pull` brings what is newer there.
    """
    return _located(path_or_repo, revision, subfolder)[0]


def _located(path_or_repo: str | Path, revision: str | None, subfolder: str) -> tuple[Path, str | None]:
    """The directory, and the digest that the registry knows it by (None: a bare directory)."""
    local = Path(path_or_repo).expanduser()
    if local.is_dir():
        if revision is not None or subfolder:
            raise BadInput(
                f"{path_or_repo} is a directory: it has no revision and no subfolder",
                "give the directory of the mapper itself",
            )
        return local.absolute(), None
    from kvhub.hub.reference import is_place, parse

    if not is_place(str(path_or_repo)):
        return _registered(str(path_or_repo))
    from kvhub.hub.pull import here, pull

    reference = parse(str(path_or_repo), revision=revision, subfolder=subfolder)
    known = here(reference)
    if known is not None:
        return files_of(known), known.digest
    return pull(reference.place, reference.revision), None


def _registered(ref: str) -> tuple[Path, str]:
    row = find(ref)
    return directory_of(row.digest), row.digest
