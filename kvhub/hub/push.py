"""`push`: one verified mapper into one Hub repository, in one commit."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.layout import EVIDENCE, MANIFEST, SIGNATURE
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import verify_artifact
from kvhub.catalog import record_location
from kvhub.errors import BadInput, Corrupt, Incompatible, KvhubError, NotFound
from kvhub.evaluation.gate import reason, rejudge
from kvhub.hub import client
from kvhub.hub.card import card, on_hub
from kvhub.hub.download import Progress
from kvhub.hub.figures import figures
from kvhub.hub.upload import upload
from kvhub.settings import Settings
from kvhub.store.signature import read_signature
from kvhub_registry import HubLocation

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo

CARD = "README.md"


@dataclass(frozen=True)
class Pushed:
    """What is on the Hub now."""

    repo_id: str
    commit: str
    manifest: Manifest
    tag: str | None
    pull_request: str | None = None
    """Its URL, where the mapper was proposed and not published."""


def push(
    directory: Path,
    repo_id: str,
    *,
    private: bool = False,
    tag: str | None = None,
    message: str | None = None,
    licence: str | None = None,
    allow_unevaluated: bool = False,
    create_pr: bool = False,
    progress: Progress | None = None,
    settings: Settings | None = None,
) -> Pushed:
    """Publish the artifact in `directory`, with a generated card, and note the place in the registry.

    Every byte is verified before anything is sent. The commit is made against
    the head that was seen, so that somebody else's push is never overwritten,
    and what the Hub then says it holds is compared with the manifest. Weights go
    first, each file its own unit of retry; a commit never names half of them.
    create_pr: propose the commit to a repository that exists, instead.
    Errors: `Corrupt`, `Incompatible` (no evidence), `BadInput` (a repository
    of something else; a tag that is taken), `AccessDenied`, `Unreachable`.
    """
    if client.split(repo_id)[1] is not None:
        raise BadInput(f"{repo_id!r} names a revision", "push goes to main; name the version with --tag")
    manifest = verify_artifact(directory, deep=True)
    evidence = read_evidence(directory, manifest)
    if evidence is None and not allow_unevaluated:
        raise Incompatible(
            f"mapper {manifest.digest[:12]} has no evidence",
            "kvhub eval measures it; --allow-unevaluated publishes it as it is, and the card says so",
            code="unevaluated",
        )
    if evidence is not None and not allow_unevaluated and not (ours := rejudge(evidence, manifest)).passed:
        raise Incompatible(
            f"mapper {manifest.digest[:12]} does not pass the gate: {reason(ours)}",
            "--allow-unevaluated publishes it as it is, and the card says so",
            code="gate",
        )
    if create_pr and tag:
        raise BadInput("a proposal has no tag", "tag the version once it is merged")
    verdict = rejudge(evidence, manifest) if evidence else None
    images: dict[str, Path | bytes] = {path.name: path for path in (directory / "assets").glob("*.png")}
    for name, data in figures(manifest, evidence).items():
        images.setdefault(name, data)
    hub = client.api()
    licences = _licences(hub, manifest)
    readme = card(
        manifest, evidence, verdict, repo_id, licence=licence, images=sorted(images), licences=licences
    ).encode()
    files: dict[str, Path | bytes] = {entry.name: directory / entry.name for entry in manifest.files}
    files |= {MANIFEST: manifest.to_bytes(), CARD: readme}
    files |= {f"assets/{name}": content for name, content in images.items()}
    if evidence is not None:
        files[EVIDENCE] = evidence.to_bytes()
    if (signature := read_signature(directory, manifest)) is not None:
        files[SIGNATURE] = signature.to_bytes()

    if not create_pr:
        client.ask(repo_id, lambda: hub.create_repo(repo_id, private=private or None, exist_ok=True))
    head = _info(hub, repo_id)
    present = {sibling.rfilename for sibling in head.siblings or []}
    if MANIFEST not in present and present & (files.keys() - {CARD}):
        raise BadInput(f"{repo_id} holds something that is no mapper", "push to another repository")
    taken = _tag(hub, repo_id, tag) if tag else None
    if taken is not None and not (taken == head.sha and _holds(head, manifest)):  # before anything is written
        raise BadInput(f"{repo_id} has a tag {tag!r} already", "tags do not move: choose another")
    title = (
        message or f"kvhub mapper {manifest.digest[:12]}: {manifest.source.name} -> {manifest.target.name}"
    )
    commit, proposal = _commit(
        hub, repo_id, files, _stale(present, files), title, head.sha, create_pr=create_pr, progress=progress
    )
    _compare(_info(hub, repo_id, commit), manifest)
    if tag and taken != commit:
        client.ask(repo_id, lambda: hub.create_tag(repo_id, tag=tag, revision=commit))
    with suppress(NotFound):  # a directory that was never registered here
        record_location(manifest.digest, HubLocation(repo_id=repo_id, commit=commit, pushed=True), settings)
    return Pushed(repo_id, commit, manifest, tag, proposal)


def _holds(head: ModelInfo, manifest: Manifest) -> bool:
    """Whether this very mapper is what the repository holds now."""
    try:
        _compare(head, manifest)
    except KvhubError:
        return False
    return True


def _info(hub: HfApi, repo_id: str, revision: str | None = None) -> ModelInfo:
    return client.ask(
        repo_id, lambda: hub.model_info(repo_id, revision=revision, files_metadata=True), revision=revision
    )


def _licences(hub: HfApi, manifest: Manifest) -> dict[str, str]:
    """What the cards of both models declare, where the Hub says so; by name of the model."""
    found: dict[str, str] = {}
    for model in (manifest.source, manifest.target):
        if on_hub(model):
            with suppress(Exception):  # a card without it is no reason not to publish
                card_data = hub.model_info(model.name, timeout=10).card_data
                said = getattr(card_data, "license", None)
                if isinstance(said, str) and said:
                    found[model.name] = said[:64]
    return found


def _tag(hub: HfApi, repo_id: str, tag: str) -> str | None:
    """The commit of a tag, None where there is no such tag."""
    refs = client.ask(repo_id, lambda: hub.list_repo_refs(repo_id))
    return next((str(ref.target_commit) for ref in refs.tags if ref.name == tag), None)


def _stale(present: Iterable[str], files: Iterable[str]) -> list[str]:
    """Files of an earlier mapper in this repository that this one does not have."""
    ours = [n for n in present if n.startswith(("model", "assets/")) or n in (EVIDENCE, SIGNATURE)]
    return sorted(set(ours) - set(files))


def _commit(
    hub: HfApi,
    repo_id: str,
    files: dict[str, Path | bytes],
    stale: list[str],
    title: str,
    parent: str | None,
    *,
    create_pr: bool,
    progress: Progress | None,
) -> tuple[str, str | None]:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    sent = upload(hub, repo_id, files, create_pr=create_pr, progress=progress)

    def send() -> tuple[str, str | None]:
        operations: list[CommitOperationAdd | CommitOperationDelete] = [*sent()]
        operations += [CommitOperationDelete(path_in_repo=name) for name in stale]
        done = hub.create_commit(
            repo_id, operations, commit_message=title, parent_commit=parent, create_pr=create_pr
        )
        return str(done.oid), done.pr_url

    return client.ask(repo_id, send)


def _compare(info: ModelInfo, manifest: Manifest) -> None:
    """What the Hub lists at our commit must be what we sent, as far as it says."""
    held = {sibling.rfilename: sibling for sibling in info.siblings or []}
    for entry in manifest.files:
        sibling = held.get(entry.name)
        if sibling is None:
            raise KvhubError(f"the Hub does not list {entry.name} after the push", "push again")
        lfs = sibling.lfs.sha256 if sibling.lfs else entry.sha256
        if lfs != entry.sha256 or sibling.size not in (None, entry.size):
            raise Corrupt(f"the Hub holds another {entry.name} than was sent", "push again")
