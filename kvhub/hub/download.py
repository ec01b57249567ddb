"""Getting files of a repository at one commit: in parallel, a shard as the unit of retry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.hub.parallel import for_each
from kvhub.hub.remote import Remote, download

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PARALLEL = 4

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def download_all(
    hub: HfApi,
    remote: Remote,
    sizes: Mapping[str, int],
    staged: Path,
    *,
    total: int,
    progress: Progress | None,
) -> None:
    """Several files at once; the first failure ends it.

    sizes: bytes by name, and no more is taken. total: bytes, for `progress`.
    """

    def report() -> None:
        if progress is not None:
            progress(min(_written(staged), total), total)

    for_each(
        list(sizes),
        lambda name: download(hub, remote, name, staged, sizes[name]),
        lambda _: None,
        threads=PARALLEL,
        name="kvhub-pull",
        waiting=report,
    )


def _written(staged: Path) -> int:
    size = 0
    for path in staged.rglob("*"):
        try:
            size += path.lstat().st_size
        except FileNotFoundError:
            continue
    return size
