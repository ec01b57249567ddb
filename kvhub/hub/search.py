"""`search`: mappers on the Hub, by one listing call; what it answers is checked before it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvhub.hub import client
from kvhub.hub.card import tag
from kvhub_registry import MapperRow

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

LIMIT = 200
_SCORES = ("top1", "kl", "gap_recovered", "attention_cosine")


@dataclass(frozen=True)
class Hit:
    """One repository; everything but `repo_id` is what its author says."""

    repo_id: str
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
    rows: Sequence[MapperRow] = (),
    limit: int = LIMIT,
) -> list[Hit]:
    """Repositories that say they hold a mapper of this pair, most downloaded first.

    rows: the registry's, to say what is here already. Errors: the client's.
    """
    filters = ["kvhub"]
    filters += [f"kvhub-source:{tag(source)}"] if source else []
    filters += [f"kvhub-target:{tag(target)}"] if target else []
    filters += [f"kvhub-family:{family}"] if family else []
    hub = client.api()
    found = client.ask(
        "the Hub",
        lambda: list(
            hub.list_models(
                filter=filters,
                search=text,
                author=author,
                sort="downloads",
                limit=limit,
                expand=["cardData", "sha", "downloads", "lastModified", "tags", "gated"],
            )
        ),
    )
    known = {row.digest: row.state.value for row in rows}
    hits = [hit for info in found if (hit := _hit(info, known)) is not None]
    return sorted(hits, key=lambda hit: (-hit.downloads, hit.repo_id))


def local(
    rows: Sequence[MapperRow], text: str | None = None, *, author: str | None = None
) -> list[MapperRow]:
    """The same question to the registry alone: `text` in a name of a model, an alias or a repository."""
    wanted = (text or "").casefold()

    def names(row: MapperRow) -> list[str]:
        places = [place.repo_id for place in row.locations]
        return [row.source.name, row.target.name, row.digest, *row.aliases, *places]

    return [
        row
        for row in rows
        if any(wanted in name.casefold() for name in names(row))
        and (author is None or any(place.repo_id.startswith(f"{author}/") for place in row.locations))
    ]


def _hit(info: ModelInfo, known: dict[str, str]) -> Hit | None:
    """Strictly read: a card may hold anything."""
    try:
        client.split(info.id)
    except Exception:
        return None
    card = info.card_data
    block = None if card is None else getattr(card, "kvhub", None)
    block = block if isinstance(block, dict) else {}
    tags = [text for text in (info.tags or []) if isinstance(text, str)]
    digest = str(block.get("digest") or "")[:64]
    return Hit(
        repo_id=info.id,
        commit=str(info.sha or ""),
        source=_name(block.get("source"), tags, "kvhub-source:"),
        target=_name(block.get("target"), tags, "kvhub-target:"),
        family=str(block.get("family") or "")[:32],
        digest=digest,
        scores=_scores([] if card is None else card.eval_results),
        downloads=info.downloads if isinstance(info.downloads, int) else 0,
        modified=info.last_modified if isinstance(info.last_modified, datetime) else None,
        gated=bool(info.gated),
        here=known.get(digest),
    )


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
        if name in _SCORES and dataset == "all" and isinstance(value, int | float) and abs(value) < 1e6:
            found[str(name)] = float(value)
    return found
