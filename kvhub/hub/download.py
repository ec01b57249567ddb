"""A repository at one commit, and getting files of it: in parallel, a shard as the unit of retry."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvhub.artifact.layout import EVIDENCE, EVIDENCE_LIMIT, MANIFEST, MANIFEST_LIMIT, SIGNATURE
from kvhub.errors import Corrupt, NotFound
from kvhub.hub import client
from kvhub.store.signature import SIGNATURE_LIMIT

if TYPE_CHECKING:
    from huggingface_hub import HfApi

PARALLEL = 4
PATIENCE = 5.0
"""Seconds that a failed pull waits for downloads under way; what they leave is swept by the next one."""
LIMITS = {MANIFEST: MANIFEST_LIMIT, EVIDENCE: EVIDENCE_LIMIT, SIGNATURE: SIGNATURE_LIMIT}
"""Bytes of the files that no manifest vouches for."""

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True)
class Remote:
    """A repository at one commit: sizes and git blob ids of its files, None where the Hub does not say."""

    repo_id: str
    commit: str
    sizes: dict[str, int | None]
    blobs: dict[str, str | None]


def resolve(hub: HfApi, repo_id: str, revision: str | None) -> Remote:
    """What the Hub lists at a revision. Errors: `NotFound` (no mapper there), `Corrupt`, and the client's."""
    info = client.ask(
        repo_id, lambda: hub.model_info(repo_id, revision=revision, files_metadata=True), revision=revision
    )
    if not info.sha:
        raise NotFound(f"{repo_id} has no commit yet")
    siblings = info.siblings or []
    for sibling in siblings:
        known = isinstance(sibling.rfilename, str) and isinstance(sibling.blob_id, str | None)
        if not known or type(sibling.size) not in (int, type(None)):
            raise Corrupt(f"the Hub lists the files of {repo_id} in a form that is none")
    if not isinstance(info.sha, str):
        raise Corrupt(f"the Hub names no commit of {repo_id}")
    sizes = {sibling.rfilename: sibling.size for sibling in siblings}
    if MANIFEST not in sizes:
        raise NotFound(
            f"{repo_id} is not a mapper: it has no {MANIFEST}", "kvhub push makes such a repository"
        )
    for name, limit in LIMITS.items():
        size = sizes.get(name)
        if name in sizes and (size is None or size > limit):
            raise Corrupt(f"{name} of {repo_id} is larger than {limit} bytes")
    # An LFS file's blob is its pointer: those files are in the manifest, with their sha256.
    blobs = {sibling.rfilename: None if sibling.lfs else sibling.blob_id for sibling in siblings}
    return Remote(repo_id, info.sha, sizes, blobs)


def download(hub: HfApi, remote: Remote, name: str, staged: Path) -> None:
    """One file of the commit into `staged`. Errors: the client's; `Corrupt` where git's blob id differs."""
    client.ask(
        remote.repo_id,
        lambda: hub.hf_hub_download(remote.repo_id, name, revision=remote.commit, local_dir=staged),
    )
    if remote.blobs.get(name) and name in LIMITS:
        data = (staged / name).read_bytes()
        if hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() != remote.blobs[name]:
            raise Corrupt(f"{name} of {remote.repo_id} is not what was committed", "try again")


def download_all(
    hub: HfApi, remote: Remote, names: Sequence[str], staged: Path, *, total: int, progress: Progress | None
) -> None:
    """Several files at once; the first failure ends it. total: bytes, for `progress`."""
    work: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    for name in names:
        work.put(name)

    def worker() -> None:
        while not stop.is_set():
            try:
                name = work.get_nowait()
            except queue.Empty:
                return
            try:
                download(hub, remote, name, staged)
            except BaseException as error:
                done.put(error)
            else:
                done.put(None)

    # Daemons: Ctrl-C must not wait for half a gigabyte; the staging directory goes all the same.
    threads = [
        threading.Thread(target=worker, name=f"kvhub-pull-{number}", daemon=True)
        for number in range(min(PARALLEL, len(names)))
    ]
    for thread in threads:
        thread.start()
    try:
        for _ in names:
            error = _next(done, staged, total, progress)
            if error is not None:
                raise error
    except Exception:
        stop.set()
        deadline = time.monotonic() + PATIENCE
        for thread in threads:  # so that nothing is written any more when the caller cleans up
            thread.join(max(0.0, deadline - time.monotonic()))
        raise
    finally:
        stop.set()


def _next(
    done: queue.SimpleQueue[BaseException | None], staged: Path, total: int, progress: Progress | None
) -> BaseException | None:
    """The outcome of the next file, reporting bytes on disk in the meantime."""
    while True:
        try:
            return done.get(timeout=0.2)
        except queue.Empty:
            if progress is not None:
                progress(min(_written(staged), total), total)


def _written(staged: Path) -> int:
    size = 0
    for path in staged.rglob("*"):
        try:
            size += path.lstat().st_size
        except FileNotFoundError:
            continue
    return size
