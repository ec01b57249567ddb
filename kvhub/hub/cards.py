"""The cards that a push writes: the mapper's own, and the root's where a repository has several."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvhub.artifact.manifest import Manifest
from kvhub.evaluation.gate import rejudge
from kvhub.hub.card import card, on_hub
from kvhub.hub.index import Entry, entries, index_card, index_front_matter, listing
from kvhub.hub.reference import Reference
from kvhub.hub.remote import Remote, download, mapper_folders

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo

CARD = "README.md"
CARD_LIMIT = 4 << 20
_PICTURE = re.compile(r"assets/[\w.-]{1,128}\.png", re.ASCII)


def cards(
    hub: HfApi,
    head: ModelInfo,
    wanted: Reference,
    pushed: Entry,
    files: Mapping[str, Path | bytes],
    licence: str | None,
) -> dict[str, Path | bytes]:
    """README.md of the mapper pushed and, where the repository then has several, of its root; by path.

    files: the mapper's own, by name. licence: of the mapper pushed; the root keeps the one it declares.
    """
    folders = [place for place in mapper_folders(head) if place != wanted.subfolder]
    others = entries(hub, wanted.repo_id, head, folders)
    images = sorted(name.removeprefix("assets/") for name in files if name.startswith("assets/"))
    if not wanted.subfolder:
        return {CARD: _card(hub, wanted, pushed, images, licence, others)}
    made: dict[str, Path | bytes] = {wanted.path(CARD): _card(hub, wanted, pushed, images, licence, [])}
    root = next((entry for entry in others if not entry.subfolder), None)
    inner = sorted(
        [pushed, *(entry for entry in others if entry.subfolder)], key=lambda entry: entry.subfolder
    )
    declared = _licence(head)
    if root is None:
        made[CARD] = index_card(inner, wanted.repo_id, declared or licence).encode()
    else:
        names = [sibling.rfilename for sibling in head.siblings or []]
        shown = sorted(name.removeprefix("assets/") for name in names if _PICTURE.fullmatch(name))
        made[CARD] = _card(hub, Reference(wanted.repo_id), root, shown, declared, inner)
    return made


def _card(
    hub: HfApi,
    reference: Reference,
    entry: Entry,
    images: list[str],
    licence: str | None,
    beside: list[Entry],
) -> bytes:
    """One mapper's card; beside: the mappers in folders, where this is the root's."""
    verdict = rejudge(entry.evidence, entry.manifest) if entry.evidence else None
    more: dict[str, Any] = {}
    if beside:
        front = index_front_matter(beside, reference.repo_id, None)
        more = {key: front[key] for key in ("base_model", "datasets", "tags", "kvhub") if key in front}
    return card(
        entry.manifest,
        entry.evidence,
        verdict,
        reference.repo_id,
        licence=licence,
        images=images,
        licences=_licences(hub, entry.manifest),
        subfolder=reference.subfolder,
        more=more,
        beside=listing(beside, reference.repo_id) if beside else "",
    ).encode()


def _licences(hub: HfApi, manifest: Manifest) -> dict[str, str]:
    """What the cards of both models declare, where the Hub says so; by name of the model."""
    found: dict[str, str] = {}
    for model in (manifest.source, manifest.target):
        if on_hub(model):
            with suppress(Exception):  # a card without it is no reason not to publish
                if said := _licence(hub.model_info(model.name, timeout=10)):
                    found[model.name] = said[:64]
    return found


def kept_licence(hub: HfApi, head: ModelInfo, wanted: Reference) -> str | None:
    """The licence that this mapper's card declares already; None without one. Errors: the client's."""
    if not wanted.subfolder:
        return _licence(head)
    sizes = {sibling.rfilename: sibling.size for sibling in head.siblings or []}
    path = wanted.path(CARD)
    if path not in sizes or (sizes[path] or 0) > CARD_LIMIT:
        return None
    from huggingface_hub.repocard import metadata_load

    remote = Remote(wanted, str(head.sha), {CARD: sizes[path] or CARD_LIMIT}, {})
    with tempfile.TemporaryDirectory(prefix="kvhub-") as name:
        download(hub, remote, CARD, Path(name))
        try:
            said = metadata_load(Path(name) / path)
        except Exception:  # somebody may have written anything there
            return None
    declared = said.get("license") if isinstance(said, dict) else None
    return declared[:64] if isinstance(declared, str) and declared else None


def _licence(info: ModelInfo) -> str | None:
    """What a repository's card declares."""
    said = getattr(info.card_data, "license", None)
    return said if isinstance(said, str) and said else None
