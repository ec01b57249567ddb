"""Calibration text from a data set on the Hub: pinned, read in pieces, and only as much as is needed."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhub.errors import BadInput, KvhubError, Unreachable
from kvhub.fit.store import write_bytes
from kvhub.fit.text import documents_of

_REPOSITORY = re.compile(
    r"^(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?P<folder>(/[\w.=+-]+)*)(@(?P<revision>[A-Za-z0-9][\w./-]{0,254}))?$"
)
_COMMIT = re.compile(r"^[0-9a-f]{40}$")
_FORMATS = (".parquet", ".jsonl", ".ndjson")
_BLOCK = 4 << 20
_LINE = 64 << 20


@dataclass(frozen=True)
class Dataset:
    """What of which data set: `org/name[/folder][@revision]`."""

    repo: str
    folder: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> Dataset:
        """Errors: `BadInput`."""
        match = _REPOSITORY.match(text)
        if match is None or ".." in text:
            raise BadInput(
                f"--dataset {text} is not org/name[/folder][@revision]", "a file here is given with --text"
            )
        return cls(match["repo"], match["folder"].strip("/"), match["revision"])


def read_dataset(dataset: Dataset, *, characters: int, cache: Path, tokenizer: Any) -> tuple[list[str], str]:
    """(documents, commit): the first documents, in order of files and rows, of at least `characters` in all.

    What was read is kept under `cache`, by commit, so that the same fit started again reads the same
    documents without the network where the revision is a commit. Remote Parquet is read by row group.
    Errors: `NotFound`, `AccessDenied`, `Unreachable`, and `BadInput` for a data set without text.
    """
    from kvhub.hub.client import api

    if dataset.revision is not None and _COMMIT.match(dataset.revision):
        kept = _kept(dataset, dataset.revision, characters, cache)
        if kept.exists():
            return documents_of(_lines(kept), dataset.repo, tokenizer), dataset.revision
    with _explained(dataset):
        info = api().dataset_info(dataset.repo, revision=dataset.revision)
    commit = str(info.sha)
    if not _COMMIT.match(commit):
        raise Unreachable(f"the Hub names no commit for {dataset.repo}")
    kept = _kept(dataset, commit, characters, cache)
    if not kept.exists():
        names = sorted(
            sibling.rfilename
            for sibling in info.siblings or []
            if sibling.rfilename.endswith(_FORMATS) and sibling.rfilename.startswith(_prefix(dataset))
        )
        if not names:
            raise BadInput(
                f"{dataset.repo} has no Parquet or JSONL file"
                + (f" in {dataset.folder}" * bool(dataset.folder)),
                "name a folder of it: org/name/folder",
            )
        with _explained(dataset):
            records = _take(_records(dataset, commit, names), characters)
        kept.parent.mkdir(parents=True, exist_ok=True)
        body = b"".join(json.dumps(record).encode() + b"\n" for record in records)
        write_bytes(kept, body + _sum(body) + b"\n")
    return documents_of(_lines(kept), dataset.repo, tokenizer), commit


def _prefix(dataset: Dataset) -> str:
    return f"{dataset.folder}/" if dataset.folder else ""


def _kept(dataset: Dataset, commit: str, characters: int, cache: Path) -> Path:
    what = f"{dataset.repo}\n{dataset.folder}\n{commit}\n{characters}"
    return cache / "datasets" / f"{hashlib.sha256(what.encode()).hexdigest()[:32]}.jsonl"


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Records of a kept file, whose last line is the sha256 of the others: what is damaged is not fitted."""
    body, _, last = path.read_bytes().rstrip(b"\n").rpartition(b"\n")
    if last != _sum(body + b"\n"):
        path.unlink(missing_ok=True)
        raise KvhubError(f"{path} was damaged and is removed", "start again")
    for number, line in enumerate(body.splitlines(), 1):
        yield number, json.loads(line)


def _sum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def _take(records: Iterator[dict[str, Any]], characters: int) -> list[dict[str, Any]]:
    taken: list[dict[str, Any]] = []
    total = 0
    for record in records:
        taken.append(record)
        text = record.get("text")
        total += len(text) if isinstance(text, str) else len(json.dumps(record.get("messages")))
        if total >= characters:
            break
    return taken


def _records(dataset: Dataset, commit: str, names: list[str]) -> Iterator[dict[str, Any]]:
    from huggingface_hub import HfFileSystem

    from kvhub.hub.client import api

    files = HfFileSystem(endpoint=api().endpoint)
    for name in names:
        path = f"datasets/{dataset.repo}@{commit}/{name}"
        with files.open(path, "rb", block_size=_BLOCK) as file:
            if name.endswith(".parquet"):
                from kvhub.fit.parquet import parquet_records

                for _, record in parquet_records(file, f"{dataset.repo}/{name}"):
                    yield record
            else:
                yield from _json_records(file, f"{dataset.repo}/{name}")


def _json_records(file: Any, where: str) -> Iterator[dict[str, Any]]:
    reader = io.BufferedReader(file, _BLOCK)  # the file's own readline has no bound
    for number, line in enumerate(iter(lambda: reader.readline(_LINE), b""), 1):
        if line.strip():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                raise BadInput(
                    f"line {number} of {where} is not a JSON object",
                    'each line is one record: {"text": "..."}',
                )
            yield {key: value[key] for key in ("text", "messages") if key in value}


@contextmanager
def _explained(dataset: Dataset) -> Iterator[None]:
    """Errors of the Hub's client as ours."""
    from kvhub.hub.client import explain

    try:
        yield
    except KvhubError:
        raise
    except Exception as error:
        raise explain(error, dataset.repo, dataset.revision) from error
