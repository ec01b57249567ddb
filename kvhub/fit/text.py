"""Calibration text: files -> documents -> two sides -> windows of token ids.

Documents are told apart by the first of these that yields at least
`ENOUGH_DOCUMENTS` in the file, else by the one that yields the most:

    `*.jsonl`, `*.ndjson`   one JSON object a line, its "text"
    `</doc>`                WikiExtractor files (the opening tag is dropped)
    `<|endoftext|>`, \\f     explicit separators
    two blank lines, one blank line, one line

The side of a document depends on its own content alone, so that `fit` and `eval`
agree on what was held out even when they are given different files or seeds, and
a document that occurs twice lands on one side.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvhub.errors import AccessDenied, BadInput, NotFound

ENOUGH_DOCUMENTS = 20
HELD_OUT = 0.1
MAX_BYTES = 1 << 30
_BATCH = 64

_OPENING_TAG = re.compile(r"<doc [^>\n]*>\n?")
_SEPARATORS = (r"</doc>", r"<\|endoftext\|>|\f", r"\n(?:[ \t\r]*\n){2,}", r"\n[ \t\r]*\n", r"\n")


def read_documents(paths: Sequence[Path]) -> list[str]:
    """The documents of all files, in file order, without empty ones.

    Errors, each naming the file: `NotFound`; `AccessDenied`; `BadInput` for a
    directory, an empty file, binary data, text that is not UTF-8, a JSON line
    without "text", or a file above 1 GiB.
    """
    return [document for path in paths for document in _documents(path, _read(path))]


def split_documents(
    documents: Iterable[str], *, fraction: float = HELD_OUT, seed: int = 0
) -> tuple[list[str], list[str]]:
    """(calibration, held-out), each in an order that is random but fixed by content and seed.

    A document is held out where sha256 of its content, read as a fraction of
    2**256, is below `fraction`; the seed changes the order only. Repeated
    documents are kept once.
    """
    ordered = sorted(set(documents), key=lambda document: _hash(f"{seed}\n{document}"))
    held_out = [_hash(document) < fraction * 2**256 for document in ordered]
    return (
        [document for document, out in zip(ordered, held_out, strict=True) if not out],
        [document for document, out in zip(ordered, held_out, strict=True) if out],
    )


def windows(
    documents: Iterable[str], tokenizer: Any, *, length: int, limit: int | None = None, start: int = 0
) -> Tensor:
    """Cut `documents` into windows of token ids, `[n, length]` int64.

    Documents are packed one after the other with a blank line between them; what
    does not fill a last window is dropped. Tokens that the tokenizer puts at the
    head of every text (BOS) stand at the head of every window, as they do in
    serving. `limit` stops after so many windows (`n` may be smaller, even 0);
    `start` skips so many first.
    """
    head = _head(tokenizer)
    body = length - len(head)
    if body < 1:
        raise BadInput(f"windows of {length} tokens leave no room for text", "use a longer --length")
    wanted = None if limit is None else (start + limit) * body
    ids: list[int] = []
    for tokens in _token_lists(documents, tokenizer):
        ids.extend(tokens)
        if wanted is not None and len(ids) >= wanted:
            break
    count = len(ids) // body if limit is None else min(len(ids) // body, start + limit)
    packed = torch.tensor(ids[: count * body], dtype=torch.int64).reshape(count, body)[start:]
    return torch.cat((torch.tensor(head, dtype=torch.int64).expand(len(packed), -1), packed), dim=1)


def token_digest(batches: Iterable[Tensor]) -> str:
    """sha256 over token ids: little-endian int64, every window preceded by its length."""
    digest = hashlib.sha256()
    for window in chain.from_iterable(batches):
        digest.update(len(window).to_bytes(8, "little"))
        digest.update(window.to(torch.int64).contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


def _head(tokenizer: Any) -> list[int]:
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a")["input_ids"])
    starts = (i for i in range(len(full)) if full[i : i + len(bare)] == bare)
    return full[: next(starts, 0)]


def _token_lists(documents: Iterable[str], tokenizer: Any) -> Iterator[list[int]]:
    separator = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    batch: list[str] = []
    for document in chain(documents, (None,)):
        if document is not None:
            batch.append(document)
        if batch and (document is None or len(batch) == _BATCH):
            # verbose=False: the tokenizer would warn that documents exceed the model's context.
            for tokens in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
                yield tokens + separator
            batch = []


def _read(path: Path) -> str:
    if path.is_dir():
        raise BadInput(f"{path} is a directory, not a text file")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadInput(f"{path} is larger than {MAX_BYTES >> 30} GiB", "give a sample of it")
        data = path.read_bytes()
    except FileNotFoundError:
        raise NotFound(f"no such text file: {path}") from None
    except PermissionError:
        raise AccessDenied(f"{path} may not be read") from None
    if b"\0" in data:
        raise BadInput(f"{path} is binary, not text", "give UTF-8 text, or JSON lines with a text field")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text (byte {error.start})", "convert it to UTF-8") from None
    if not text.strip():
        raise BadInput(f"{path} holds no text")
    return text


def _documents(path: Path, text: str) -> list[str]:
    if path.suffix in (".jsonl", ".ndjson"):
        return _json_lines(path, text)
    most: list[str] = []
    for separator in _SEPARATORS:
        blocks = re.split(separator, text)
        found = [block for block in (_OPENING_TAG.sub("", b).strip() for b in blocks) if block]
        if len(found) >= ENOUGH_DOCUMENTS:
            return found
        if len(found) > len(most):
            most = found
    return most


def _json_lines(path: Path, text: str) -> list[str]:
    found: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() also cuts at U+2028, legal in JSON
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        document = value.get("text") if isinstance(value, dict) else None
        if not isinstance(document, str):
            raise BadInput(f'line {number} of {path} is not a JSON object with a "text" string')
        if document.strip():
            # JSON may escape half a surrogate pair, which no tokenizer takes.
            found.append(document.strip().encode("utf-8", "replace").decode())
    if not found:
        raise BadInput(f"{path} holds no text")
    return found
