"""How people name models: `--target qwen3-32b` finds `Qwen/Qwen3-32B`."""

from __future__ import annotations

import re

ARROWS = ("->", "→")
_DIGEST = re.compile(r"[0-9a-f]{6,64}")


def slug(name: str) -> str:
    """Last path component in lower case, without a revision: `Qwen/Qwen3-32B@main` -> `qwen3-32b`."""
    head, at, _ = name.strip().rpartition("@")
    return (head if at and head else name.strip()).rstrip("/").rpartition("/")[2].casefold()


def answers_to(name: str, query: str) -> bool:
    """Whether a model called `name` is meant by `query`: the full name or its slug, any case."""
    wanted = query.strip().casefold()
    return wanted == name.casefold() or ("/" not in wanted and wanted == slug(name))


def split_pair(ref: str) -> tuple[str, str] | None:
    """`source->target` as two model names, or None where `ref` is not a pair."""
    for arrow in ARROWS:
        source, found, target = ref.partition(arrow)
        if found and source.strip() and target.strip():
            return source.strip(), target.strip()
    return None


def is_digest_prefix(ref: str) -> bool:
    """Whether `ref` may be a digest or the beginning of one (six hex digits at least)."""
    return _DIGEST.fullmatch(ref) is not None
