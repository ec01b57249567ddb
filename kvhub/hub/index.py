"""A repository of several mappers: each in a folder with its own card, and one at the root lists them.

The list is made from the manifests and the evidence that the repository holds, never from an older card.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.layout import EVIDENCE, MANIFEST
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import read_manifest
from kvhub.errors import Corrupt, Incompatible
from kvhub.evaluation.evidence import ALL, Evidence
from kvhub.evaluation.gate import rejudge
from kvhub.hub.card import INDEXED, front_matter, markdown, tag, text, worst_text
from kvhub.hub.reference import Reference
from kvhub.hub.remote import download, mapper_folders, remote_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo

AUTOMATIC = "auto"
PARALLEL = 4


@dataclass(frozen=True)
class Entry:
    """One mapper of a repository. `subfolder` is "" at the root."""

    subfolder: str
    manifest: Manifest
    evidence: Evidence | None


def automatic(hub: HfApi, repo_id: str, info: ModelInfo, manifest: Manifest) -> str:
    """The folder of a pair: `qwen3-8b-to-qwen3-32b`. A newer mapper of the pair takes the same.

    Where another pair is there already (models of other organisations may be called alike), part of the
    digest makes the difference.
    """
    names = (manifest.source.name, manifest.target.name)
    pair = "-to-".join(re.sub(r"\.{2,}", ".", tag(name)[:40]).lstrip("_-.") or "unnamed" for name in names)
    if pair in mapper_folders(info):
        held = entries(hub, repo_id, info, [pair])
        if not held or (held[0].manifest.source.name, held[0].manifest.target.name) != names:
            return f"{pair}-{manifest.digest[:8]}"
    return pair


def entries(hub: HfApi, repo_id: str, info: ModelInfo, folders: Sequence[str]) -> list[Entry]:
    """The mappers in these folders of a repository; what cannot be read is left out. Errors: the client's."""
    with tempfile.TemporaryDirectory(prefix="kvhub-") as name, ThreadPoolExecutor(PARALLEL) as pool:

        def read(place: str) -> Entry | None:
            try:
                remote = remote_of(info, Reference(repo_id, place))
                for file in (MANIFEST, EVIDENCE):
                    if file in remote.sizes:
                        download(hub, remote, file, Path(name))
                manifest = read_manifest(Path(name) / place)
                return Entry(place, manifest, read_evidence(Path(name) / place, manifest))
            except (Corrupt, Incompatible):
                return None

        return [entry for entry in pool.map(read, folders) if entry is not None]


def index_front_matter(listed: Sequence[Entry], repo_id: str, licence: str | None) -> dict[str, Any]:
    """The metadata of a root without a mapper of its own: that of all mappers together."""
    fronts = [front_matter(entry.manifest, entry.evidence, repo_id) for entry in listed]
    front: dict[str, Any] = {"library_name": "kvhub"}
    if licence:
        front["license"] = licence
    for key in ("base_model", "datasets", "tags"):
        found = list(dict.fromkeys(value for one in fronts for value in one.get(key, [])))
        if found:
            front[key] = found
        if key == "base_model" and found:
            front["base_model_relation"] = "adapter"
    return front | {"kvhub": {"mappers": blocks(listed)}}


def blocks(listed: Sequence[Entry]) -> list[dict[str, Any]]:
    """What `kvhub search` reads of each mapper in a folder."""
    return [
        {
            "folder": entry.subfolder,
            "digest": entry.manifest.digest,
            "source": text(entry.manifest.source.name),
            "target": text(entry.manifest.target.name),
            "family": entry.manifest.family,
            "scores": {
                metric: round(score.value, 6)
                for metric in INDEXED
                if entry.evidence and (score := entry.evidence.score(metric, "mapped", ALL)) is not None
            },
        }
        for entry in listed
    ]


def index_card(listed: Sequence[Entry], repo_id: str, licence: str | None = None) -> str:
    """README.md at the root of a repository whose mappers are all in folders."""
    import yaml

    front = yaml.safe_dump(index_front_matter(listed, repo_id, licence), sort_keys=False, allow_unicode=True)
    said = f"Declared: `{text(licence)}`." if licence else "None is declared here."
    body = [
        f"# KV cache mappers: {markdown(repo_id.partition('/')[2])}",
        "Each mapper turns the KV cache that its source has computed into the one that its target would have "
        "computed, in this direction and for exactly these revisions only. The folder's own card has its "
        "method, every score with controls, limits, licences and the sha256 of every file.",
        listing(listed, repo_id),
        f"## Licence\n\n{said} The weights derive from the models named above, whose licences apply.",
    ]
    return f"---\n{front}---\n\n" + "\n\n".join(body) + "\n"


def listing(listed: Sequence[Entry], repo_id: str) -> str:
    """A table of mappers, and how to fetch one."""
    rows = ["| folder | source | target | digest | gate | top-1 | worst text |", "| --- " * 7 + "|"]
    rows += [_row(entry) for entry in sorted(listed, key=lambda entry: entry.subfolder)]
    first = listed[0].subfolder if listed else "FOLDER"
    return "\n".join(rows) + f"\n\n```sh\nkvhub pull {Reference(repo_id, first).place}\n```"


def _row(entry: Entry) -> str:
    manifest, evidence = entry.manifest, entry.evidence
    score = evidence.score("top1", "mapped", ALL) if evidence else None
    gate = "not evaluated" if evidence is None else "fails"
    if evidence is not None and rejudge(evidence, manifest).passed:
        gate = "passes"
    place = f"[{markdown(entry.subfolder)}]({entry.subfolder}/README.md)" if entry.subfolder else "(root)"
    cells = (
        place,
        markdown(manifest.source.name),
        markdown(manifest.target.name),
        f"`{manifest.digest[:12]}`",
        gate,
        f"{score.value:.4f}" if score else "-",
        (worst_text(evidence) if evidence else "") or "-",
    )
    return "| " + " | ".join(cells) + " |"
