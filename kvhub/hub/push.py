"""`push`: one verified mapper into a Hub repository, at its root or in a folder, in one commit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.layout import EVIDENCE, MANIFEST, SIGNATURE
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import verify_artifact
from kvhub.catalog import explained, open_registry, record_location
from kvhub.diagnostics.record import read_diagnostics
from kvhub.errors import BadInput, Corrupt, Incompatible, KvhubError, NotFound
from kvhub.evaluation.gate import reason, rejudge
from kvhub.hub import client
from kvhub.hub.cards import cards, kept_licence
from kvhub.hub.download import Progress
from kvhub.hub.figures import CURVE, SELECTION, figures
from kvhub.hub.index import AUTOMATIC, Entry, automatic
from kvhub.hub.reference import Reference, is_place, is_revision, parse
from kvhub.hub.remote import blob_id, check_listing, mapper_folders
from kvhub.hub.upload import upload
from kvhub.settings import Settings
from kvhub.store.signature import read_signature
from kvhub_registry import HubLocation

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo

    from kvhub.evaluation.evidence import Evidence


@dataclass(frozen=True)
class Pushed:
    """What is on the Hub now."""

    repo_id: str
    commit: str
    manifest: Manifest
    tag: str | None
    pull_request: str | None = None
    """Its URL, where the mapper was proposed and not published."""
    subfolder: str = ""
    licence: str | None = None
    """What its card declares."""

    @property
    def place(self) -> str:
        """`org/name[/folder]`, as pull takes it."""
        return Reference(self.repo_id, self.subfolder).place


def push(
    directory: Path,
    reference: str,
    *,
    subfolder: str = "",
    private: bool = False,
    tag: str | None = None,
    message: str | None = None,
    licence: str | None = None,
    allow_unevaluated: bool = False,
    create_pr: bool = False,
    progress: Progress | None = None,
    settings: Settings | None = None,
) -> Pushed:
    """Publish the artifact in `directory` as `org/name[/folder]`, with a card, and note the place here.

    subfolder: a folder of a repository with several mappers; `auto` names it by the pair, and so does "" in
    a repository whose mappers are all in folders. One folder, or the root, holds one mapper a revision.

    Every byte is verified before anything is sent. The commit is made against
    the head that was seen, so that somebody else's push is never overwritten,
    and what the Hub then says it holds is compared with the manifest. Weights go
    first, each file its own unit of retry; a commit never names half of them.
    create_pr: propose the commit to a repository that exists, instead; that is noted here as
    `org/name@refs/pr/N`, and is no place of the mapper. licence: else the card's stays.
    Errors: `Corrupt`, `Incompatible` (no evidence), `BadInput` (a repository
    of something else; a tag that is taken), `AccessDenied`, `Unreachable`.
    """
    wanted = parse(reference, subfolder=subfolder)
    if wanted.revision is not None:
        raise BadInput(
            f"{reference[:200]!r} names a revision", "push goes to main; name the version with --tag"
        )
    if tag is not None and not is_revision(tag):
        raise BadInput(
            f"{tag[:200]!r} cannot be a tag", "letters, digits, '.', '_', '-' and '/', as in v1; at most 255"
        )
    if create_pr and tag:
        raise BadInput("a proposal has no tag", "tag the version once it is merged")
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
            f"mapper {manifest.digest[:12]} does not pass the {reason(ours)}",
            "--allow-unevaluated publishes it as it is, and the card says so",
            code="gate",
        )
    hub = client.api()
    repo_id = wanted.repo_id
    if not create_pr:
        client.ask(repo_id, lambda: _create(hub, repo_id, private))
    head = _info(hub, repo_id)
    check_listing(head, repo_id)
    wanted = replace(wanted, subfolder=_subfolder(hub, wanted, head, manifest))
    files = _files(directory, manifest, evidence)
    present = {sibling.rfilename for sibling in head.siblings or []}
    planned = {wanted.path(name) for name in files}
    if wanted.path(MANIFEST) not in present and present & planned:
        raise BadInput(f"{wanted.place} holds something that is no mapper", "push to another repository")
    taken = _tag(hub, repo_id, tag) if tag else None
    sent = {wanted.path(name): content for name, content in files.items()}
    licence = licence or kept_licence(hub, head, wanted)
    sent |= cards(hub, head, wanted, Entry(wanted.subfolder, manifest, evidence), files, licence)
    title = (
        message or f"kvhub mapper {manifest.digest[:12]}: {manifest.source.name} -> {manifest.target.name}"
    )
    stale = _stale(present, sent, wanted)
    unlike = [
        *stale,
        *_unlike(head, sent, {wanted.path(entry.name): entry.sha256 for entry in manifest.files}),
    ]
    if taken is not None and (unlike or taken != head.sha):  # before anything is sent
        differs = f", and {unlike[0]} would differ from it" if taken == head.sha else ""
        raise BadInput(
            f"{repo_id} has a tag {tag!r} already, at commit {taken[:8]}{differs}",
            "tags do not move: choose another, or leave --tag out",
        )

    def send() -> tuple[str, str | None]:
        return _commit(hub, repo_id, sent, stale, title, head.sha, create_pr=create_pr, progress=progress)

    if not unlike and not create_pr:
        commit, proposal = str(head.sha), None  # all of it is there
    else:
        try:
            commit, proposal = send()
        except client.NoXet:
            with client.without_xet():
                commit, proposal = send()
    _compare(_info(hub, repo_id, commit), wanted, manifest)
    if tag and taken != commit:
        _name(hub, repo_id, tag, commit)
    with suppress(NotFound):  # a directory that was never registered here
        if create_pr:
            _proposed(manifest.digest, wanted.place, commit, proposal, settings)
        else:
            place = HubLocation(repo_id=wanted.place, commit=commit, pushed=True)
            record_location(manifest.digest, place, settings)
    return Pushed(repo_id, commit, manifest, tag, proposal, wanted.subfolder, licence)


def _proposed(digest: str, place: str, commit: str, url: str | None, settings: Settings | None) -> None:
    """Note a proposal under its own revision: it is no place of the mapper before somebody merges it."""
    number = (url or "").rstrip("/").rpartition("/")[2]
    name = f"{place}@refs/pr/{number}"
    if number.isdigit() and is_place(name):
        with explained(), open_registry(settings) as registry:
            registry.set_alias(name, digest, f"proposed {commit[:8]}")


def _files(directory: Path, manifest: Manifest, evidence: Evidence | None) -> dict[str, Path | bytes]:
    """Everything but the card, by name."""
    images: dict[str, Path | bytes] = {path.name: path for path in (directory / "assets").glob("*.png")}
    diagnostics = None
    with suppress(KvhubError):  # a description, not evidence: a damaged one is left out
        diagnostics = read_diagnostics(directory, manifest)
    for name, data in figures(manifest, evidence, diagnostics).items():
        images.setdefault(name, data)
    if CURVE in images:
        images.pop(SELECTION, None)
    files: dict[str, Path | bytes] = {entry.name: directory / entry.name for entry in manifest.files}
    files[MANIFEST] = manifest.to_bytes()
    files |= {f"assets/{name}": content for name, content in images.items()}
    if evidence is not None:
        files[EVIDENCE] = evidence.to_bytes()
    if (signature := read_signature(directory, manifest)) is not None:
        files[SIGNATURE] = signature.to_bytes()
    return files


def _subfolder(hub: HfApi, wanted: Reference, head: ModelInfo, manifest: Manifest) -> str:
    """Where a mapper goes: as asked; by its pair, where asked or where all mappers here are in folders."""
    held = mapper_folders(head)
    if wanted.subfolder == AUTOMATIC or (not wanted.subfolder and held and "" not in held):
        return automatic(hub, wanted.repo_id, head, manifest)
    return wanted.subfolder


def _create(hub: HfApi, repo_id: str, private: bool) -> None:
    """A repository where there is none. The client's own `exist_ok` cannot read addresses of a Hub of one's
    own where the repository is somebody else's."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        hub.create_repo(repo_id, private=private or None)
    except HfHubHTTPError as error:
        status = error.response.status_code
        # 403: who may not create one may still write to it; the first file says.
        if status != 409 and not (status == 403 and hub.repo_exists(repo_id)):
            raise


def _unlike(head: ModelInfo, files: Mapping[str, Path | bytes], known: Mapping[str, str]) -> list[str]:
    """Files of a push that the repository does not hold as they are. known: sha256 that were verified."""
    held = {sibling.rfilename: sibling for sibling in head.siblings or []}

    def same(name: str, content: Path | bytes) -> bool:
        sibling = held.get(name)
        if sibling is None or sibling.size not in (None, _length(content)):
            return False
        if sibling.lfs and name in known:
            return bool(sibling.lfs.sha256 == known[name])
        data = content if isinstance(content, bytes) else content.read_bytes()
        if sibling.lfs:
            return bool(sibling.lfs.sha256 == hashlib.sha256(data).hexdigest())
        return bool(sibling.blob_id == blob_id(data))

    return [name for name, content in files.items() if not same(name, content)]


def _length(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _name(hub: HfApi, repo_id: str, tag: str, commit: str) -> None:
    """Give a commit its tag; somebody else may have taken it since it was looked for."""
    try:
        client.ask(repo_id, lambda: hub.create_tag(repo_id, tag=tag, revision=commit))
    except KvhubError:
        taken = _tag(hub, repo_id, tag)
        if taken is None:
            raise
        if taken != commit:
            raise BadInput(
                f"pushed as {repo_id}@{commit[:8]}, but {tag!r} has been taken meanwhile, at {taken[:8]}",
                "the same command with another --tag names it",
            ) from None


def _info(hub: HfApi, repo_id: str, revision: str | None = None) -> ModelInfo:
    return client.ask(
        repo_id, lambda: hub.model_info(repo_id, revision=revision, files_metadata=True), revision=revision
    )


def _tag(hub: HfApi, repo_id: str, tag: str) -> str | None:
    """The commit of a tag, None where there is no such tag."""
    refs = client.ask(repo_id, lambda: hub.list_repo_refs(repo_id))
    return next((str(ref.target_commit) for ref in refs.tags if ref.name == tag), None)


def _stale(present: Iterable[str], files: Iterable[str], wanted: Reference) -> list[str]:
    """Files of an earlier mapper in this place that this one does not have."""
    inner = {name.removeprefix(wanted.within) for name in present if name.startswith(wanted.within)}
    ours = [
        name
        for name in inner
        if name.startswith("assets/")
        or ("/" not in name and name.startswith("model"))
        or name in (EVIDENCE, SIGNATURE)
    ]
    return sorted({wanted.path(name) for name in ours} - set(files))


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


def _compare(info: ModelInfo, wanted: Reference, manifest: Manifest) -> None:
    """What the Hub lists at our commit must be what we sent, as far as it says."""
    held = {sibling.rfilename: sibling for sibling in info.siblings or []}
    for entry in manifest.files:
        sibling = held.get(wanted.path(entry.name))
        if sibling is None:
            raise KvhubError(f"the Hub does not list {entry.name} after the push", "push again")
        lfs = sibling.lfs.sha256 if sibling.lfs else entry.sha256
        if lfs != entry.sha256 or sibling.size not in (None, entry.size):
            raise Corrupt(f"the Hub holds another {entry.name} than was sent", "push again")
