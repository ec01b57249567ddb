"""Sending the files of a commit: weights first, several at once, each its own unit of retry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.hub import client
from kvhub.hub.download import Progress
from kvhub.hub.parallel import for_each

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

PARALLEL = 2
"""Weight files at once; the client itself sends the parts of one in parallel."""


def upload(
    hub: HfApi,
    repo_id: str,
    files: dict[str, Path | bytes],
    *,
    create_pr: bool = False,
    progress: Progress | None = None,
) -> Callable[[], list[CommitOperationAdd]]:
    """Send the weights; returns what makes the commit's operations.

    Weights already sent are not sent again when the commit is tried again, and what is small goes with
    the commit itself. Files are given as paths, so nothing large is held in memory.
    Errors: the client's.
    """
    from huggingface_hub import CommitOperationAdd

    large = {
        name: path for name, path in files.items() if isinstance(path, Path) and name.endswith(".safetensors")
    }
    total = sum(path.stat().st_size for path in large.values())
    sent: list[CommitOperationAdd] = []

    def send(name: str, path: Path) -> CommitOperationAdd:
        def once() -> CommitOperationAdd:
            # A new operation for each attempt: the client marks it as it goes.
            operation = CommitOperationAdd(path_in_repo=name, path_or_fileobj=path)
            hub.preupload_lfs_files(repo_id, [operation], create_pr=create_pr)
            return operation

        return client.ask(repo_id, once)

    finished = 0

    def report(outcome: tuple[CommitOperationAdd, int]) -> None:
        nonlocal finished
        sent.append(outcome[0])
        finished += outcome[1]
        if progress is not None:
            progress(finished, total)

    for_each(
        list(large.items()),
        lambda item: (send(*item), item[1].stat().st_size),
        report,
        threads=PARALLEL,
        name="kvhub-push",
    )

    def operations() -> list[CommitOperationAdd]:
        small = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
            for name, content in files.items()
            if name not in large
        ]
        return [*sent, *small]

    return operations
