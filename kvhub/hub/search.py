"""`search`: mappers on the Hub, by one listing call; what it answers is checked before it is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvhub.hub import bounds, client
from kvhub.hub.card import INDEXED, tag
from kvhub.hub.reference import is_folder
from kvhub.hub.remote import card_block
from kvhub.model.identity import MOST

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

    from kvhub_registry import MapperRow

LIMIT = 200


@dataclass(frozen=True)
class Hit:
    """One mapper; everything but the place is what its author says."""

    repo_id: str
    """`org/name`, or `org/name/folder` of a repository with several: as pull takes it."""
    commit: str
    source: str
    target: str
    family: str
    digest: str
    scores: dict[str, float]
    downloads: int
    modified: datetime | None
    gated: bool
    here: str | None
    """State of this digest in the registry."""


def search(
    text: str | None = None,
    *,
    source: str | None = None,
    target: str | None = None,
    family: str | None = None,
    author: str | None = None,
    known: Mapping[str, str] | None = None,
    limit: int = LIMIT,
    note: Callable[[str], None] | None = None,
) -> list[Hit]:
    """Mappers of this pair that repositories say they hold, those of the most downloaded first.

    known: state by digest in the registry, to say what is here already. limit: repositories; note: told
    where there are more. Errors: the client's.
    """
    filters = ["kvhub"]
    filters += [f"kvhub-source:{tag(source)}"] if source else []
    filters += [f"kvhub-target:{tag(target)}"] if target else []
    filters += [f"kvhub-family:{family}"] if family else []
    hub = client.api()
    with bounds.task(client.SEARCH, one_page=True) as asked:  # a Hub may name a next page for ever
        found = client.ask(
            client.SEARCH,
            lambda: list(
                hub.list_models(
                    filter=filters,
                    search=text,
                    author=author,
                    sort="downloads",
                    limit=limit + 1,
                    expand=["cardData", "sha", "downloads", "lastModified", "tags", "gated"],
                )
            ),
        )
    if len(found) > limit and note is not None:
        note(f"only the {limit} repositories of the most downloads were looked at: narrow it down for others")
    elif asked.more and note is not None:
        note(f"only the first page, of {len(found)} repositories, was looked at: narrow it down for others")
    hits = [hit for info in found[:limit] for hit in _hits(info, known or {})]
    # The tags are those of all mappers in a repository together.
    hits = [
        hit
        for hit in hits
        if (not source or tag(hit.source) == tag(source))
        and (not target or tag(hit.target) == tag(target))
        and (not family or hit.family in (family, ""))
    ]
    return sorted(hits, key=lambda hit: (-hit.downloads, hit.repo_id))


def local(rows: Sequence[MapperRow], text: str) -> list[MapperRow]:
    """The same question to the registry alone: `text` in the name of a model, a place or itself."""
    wanted = text.casefold()

    def names(row: MapperRow) -> list[str]:
        places = [place.repo_id for place in row.locations]
        return [row.source.name, row.target.name, row.digest, *row.aliases, *places]

    return [row for row in rows if any(wanted in name.casefold() for name in names(row))]


def _hits(info: ModelInfo, known: Mapping[str, str]) -> list[Hit]:
    """Strictly read: a card may hold anything."""
    try:
        client.split(info.id)
    except Exception:
        return []
    card = info.card_data
    block, inner = card_block(info)
    tags = [text for text in (info.tags or []) if isinstance(text, str)]
    found = []
    if block.get("digest") or not inner:
        scores = _scores([] if card is None else card.eval_results)
        source = _name(block.get("source"), tags, "kvhub-source:")
        target = _name(block.get("target"), tags, "kvhub-target:")
        found.append(_hit(info, info.id, block, source, target, scores, known))
    for entry in inner:
        place = entry.get("folder")
        if isinstance(place, str) and place and is_folder(place):
            source, target = (str(entry.get(role) or "-")[:128] for role in ("source", "target"))
            scores = _numbers(entry.get("scores"))
            found.append(_hit(info, f"{info.id}/{place}", entry, source, target, scores, known))
    return found


def _hit(
    info: ModelInfo,
    place: str,
    block: dict[str, Any],
    source: str,
    target: str,
    scores: dict[str, float],
    known: Mapping[str, str],
) -> Hit:
    digest = str(block.get("digest") or "")[:64]
    return Hit(
        repo_id=place,
        commit=str(info.sha or ""),
        source=source,
        target=target,
        family=str(block.get("family") or "")[:32],
        digest=digest,
        scores=scores,
        downloads=max(0, min(info.downloads, MOST)) if type(info.downloads) is int else 0,
        modified=info.last_modified if isinstance(info.last_modified, datetime) else None,
        gated=bool(info.gated),
        here=known.get(digest),
    )


def _numbers(said: Any) -> dict[str, float]:
    """Scores of a mapper in a folder."""
    given = said if isinstance(said, dict) else {}
    return {
        name: float(given[name])
        for name in INDEXED
        if isinstance(given.get(name), int | float)
        and not isinstance(given[name], bool)
        and abs(given[name]) < 1e6
    }


def _name(said: Any, tags: Sequence[str], prefix: str) -> str:
    name = said.get("name") if isinstance(said, dict) else None
    if isinstance(name, str) and name:
        return name[:128]
    return next((text.removeprefix(prefix)[:128] for text in tags if text.startswith(prefix)), "-")


def _scores(results: Any) -> dict[str, float]:
    """Scores on all text, from the model-index."""
    found: dict[str, float] = {}
    for result in results if isinstance(results, list) else []:
        name, value = getattr(result, "metric_type", None), getattr(result, "metric_value", None)
        dataset = getattr(result, "dataset_name", None)
        if name in INDEXED and dataset == "all" and isinstance(value, int | float) and abs(value) < 1e6:
            found[str(name)] = float(value)
    return found
