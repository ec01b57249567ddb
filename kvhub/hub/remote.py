"""A mapper in a repository at one commit: its folder, its files, and which folder has a digest."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvhub.artifact.layout import EVIDENCE, EVIDENCE_LIMIT, MANIFEST, MANIFEST_LIMIT, SIGNATURE
from kvhub.errors import Corrupt, NotFound
from kvhub.hub import bounds, client
from kvhub.hub.parallel import Stopped
from kvhub.hub.reference import Reference, is_folder
from kvhub.store.signature import SIGNATURE_LIMIT
from kvhub_registry.names import is_digest_prefix

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo

LIMITS = {MANIFEST: MANIFEST_LIMIT, EVIDENCE: EVIDENCE_LIMIT, SIGNATURE: SIGNATURE_LIMIT}
"""Bytes of the files that no manifest vouches for."""
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
MOST = 1000
"""Mappers of one repository that are looked at."""


@dataclass(frozen=True)
class Remote:
    """One mapper of a repository at one commit, its files by their names in the mapper.

    sizes, blobs: bytes and git blob ids, None where the Hub does not say.
    """

    reference: Reference
    commit: str
    sizes: dict[str, int | None]
    blobs: dict[str, str | None]

    @property
    def place(self) -> str:
        """`org/name[/folder]`."""
        return self.reference.place


def resolve(hub: HfApi, reference: Reference) -> tuple[Remote, str]:
    """What the Hub lists of a mapper at a revision, and how its digest must begin ("": not asked for).

    A subfolder that is none may be a digest: then the folder of that mapper is found, or the root.
    Errors: `NotFound` (no mapper there), `Corrupt`, and the client's.
    """
    repo_id = reference.repo_id
    info = client.ask(
        repo_id,
        lambda: hub.model_info(repo_id, revision=reference.revision, files_metadata=True),
        revision=reference.revision,
    )
    if info.sha in (None, ""):
        raise NotFound(f"{repo_id} has no commit yet", "kvhub push makes one")
    check_listing(info, repo_id)
    folders = mapper_folders(info)
    wanted = reference.subfolder
    if wanted in folders:
        return remote_of(info, reference), ""
    if folders and is_digest_prefix(wanted):
        return find_digest(hub, info, reference, folders), wanted
    if folders and not wanted:
        raise NotFound(
            f"{repo_id} has {len(folders)} mappers, each in a folder: {_some(folders)}",
            f"kvhub pull {repo_id}/{folders[0]}",
        )
    if folders:
        raise NotFound(f"{repo_id} has no mapper in {wanted}", f"there are: {_some(folders)}")
    raise NotFound(f"{repo_id} is not a mapper: it has no {MANIFEST}", "kvhub push makes such a repository")


def check_listing(info: ModelInfo, repo_id: str) -> None:
    """Refuse a listing of files in a form that is none: `Corrupt`."""
    for sibling in info.siblings or []:
        known = isinstance(sibling.rfilename, str) and isinstance(sibling.blob_id, str | None)
        if not known or type(sibling.size) not in (int, type(None)):
            raise Corrupt(f"the Hub lists the files of {repo_id} in a form that is none", "check HF_ENDPOINT")
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise Corrupt(f"the Hub names no commit of {repo_id}", "check HF_ENDPOINT; try again")


def mapper_folders(info: ModelInfo) -> list[str]:
    """Where in a repository mappers are: "" for its root, and folders; in order, no more than `MOST`."""
    found = []
    for sibling in info.siblings or []:
        inside, _, name = sibling.rfilename.rpartition("/")
        if name == MANIFEST and is_folder(inside):
            found.append(inside)
    return sorted(found)[:MOST]


def remote_of(info: ModelInfo, reference: Reference) -> Remote:
    """One mapper of a listing; files that no manifest vouches for are bounded. Errors: `Corrupt`."""
    inside = reference.within
    siblings = {
        sibling.rfilename.removeprefix(inside): sibling
        for sibling in info.siblings or []
        if sibling.rfilename.startswith(inside)
    }
    sizes = {name: sibling.size for name, sibling in siblings.items()}
    for name, limit in LIMITS.items():
        size = sizes.get(name)
        if name in sizes and (size is None or size > limit):
            raise Corrupt(f"{name} of {reference.place} is larger than {limit} bytes")
    # An LFS file's blob is its pointer: those files are in the manifest, with their sha256.
    blobs = {name: None if sibling.lfs else sibling.blob_id for name, sibling in siblings.items()}
    return Remote(reference, str(info.sha), sizes, blobs)


def find_digest(hub: HfApi, info: ModelInfo, reference: Reference, folders: Sequence[str]) -> Remote:
    """The mapper whose digest begins as the subfolder says; the card only says where to look first.

    Errors: `NotFound`, and the client's.
    """
    wanted = reference.subfolder
    hinted = [place for place, digest in card_digests(info) if digest.startswith(wanted) and place in folders]
    with tempfile.TemporaryDirectory(prefix="kvhub-") as name:
        for place in dict.fromkeys([*hinted, *folders]):
            remote = remote_of(info, replace(reference, subfolder=place))
            download(hub, remote, MANIFEST, Path(name))
            data = (Path(name) / remote.reference.path(MANIFEST)).read_bytes()
            if hashlib.sha256(data).hexdigest().startswith(wanted):
                return remote
    raise NotFound(
        f"none of the {len(folders)} mappers of {reference.repo_id} has the digest {wanted[:12]}",
        "an older commit may: kvhub pull ORG/NAME/DIGEST@REVISION",
    )


def card_digests(info: ModelInfo) -> list[tuple[str, str]]:
    """Folder and digest of every mapper that the repository's card names: hints, to be checked."""
    block, listed = card_block(info)
    found = [("", block.get("digest")), *((entry.get("folder"), entry.get("digest")) for entry in listed)]
    return [(str(place), str(digest)) for place, digest in found if digest]


def card_block(info: ModelInfo) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a card says of the mapper at the root, and of those in folders; none of it is checked."""
    block = getattr(info.card_data, "kvhub", None) if info.card_data is not None else None
    block = block if isinstance(block, dict) else {}
    listed = block.get("mappers")
    inner = [entry for entry in listed[:MOST] if isinstance(entry, dict)] if isinstance(listed, list) else []
    return block, inner


def download(hub: HfApi, remote: Remote, name: str, staged: Path, size: int | None = None) -> None:
    """One file of the commit into `staged`, which exists, in the mapper's folder there.

    size: its bytes, where more is known than the listing says; what comes ends there.
    Errors: the client's; `Corrupt` where more comes, or git's blob id differs.
    """
    reference, path = remote.reference, remote.reference.path(name)
    listed = size if size is not None else remote.sizes.get(name)
    limit = LIMITS.get(name) if listed is None else listed

    def once() -> None:
        if not staged.is_dir():  # the client would make it again, after who staged it has cleaned up
            raise Stopped("stopped")
        hub.hf_hub_download(reference.repo_id, path, revision=remote.commit, local_dir=staged)

    with bounds.task(reference.place, file=name, size=limit):
        client.ask(reference.place, once)
    if remote.blobs.get(name) and name in LIMITS:
        data = (staged / path).read_bytes()
        if blob_id(data) != remote.blobs[name]:
            raise Corrupt(f"{name} of {reference.place} is not what was committed", "try again")


def blob_id(data: bytes) -> str:
    """Git's name of a file that holds `data`."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _some(folders: Sequence[str]) -> str:
    shown = ", ".join(place or "the root" for place in folders[:5])
    return shown + (f" and {len(folders) - 5} more" if len(folders) > 5 else "")
