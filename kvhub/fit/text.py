"""Calibration text: files -> documents -> two sides -> windows of token ids.

Documents are told apart by the first of these that yields at least
`ENOUGH_DOCUMENTS` in the file, else by the one that yields the most:

    `*.jsonl`, `*.ndjson`   one JSON object a line, its "text", or "messages" for a chat template
    `*.parquet`             the same from a column (needs pyarrow)
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


class Conversation(str):
    """A conversation as a chat template writes it."""

    key: str
    """The messages themselves: they decide the side, so that it is the same under every template."""


def read_documents(paths: Sequence[Path], *, tokenizer: Any = None) -> list[str]:
    """The documents of all files, in file order, without empty ones.

    tokenizer: its chat template writes conversations (records with "messages").

    Errors, each naming the file: `NotFound`; `AccessDenied`; `BadInput` for a
    directory, an empty file, binary data, text that is not UTF-8, a JSON line
    without "text", or a file above 1 GiB.
    """
    found: list[str] = []
    for path in paths:
        if path.suffix == ".parquet":
            from kvhub.fit.parquet import read_parquet

            found += documents_of(read_parquet(path), str(path), tokenizer)
        else:
            found += _documents(path, _read(path), tokenizer)
    return found


def split_documents(
    documents: Iterable[str], *, fraction: float = HELD_OUT, seed: int = 0
) -> tuple[list[str], list[str]]:
    """(calibration, held-out), each in an order that is random but fixed by content and seed.

    A document is held out where sha256 of its content, read as a fraction of
    2**256, is below `fraction`; the seed changes the order only. Repeated
    documents are kept once.
    """
    ordered = sorted(set(documents), key=lambda document: _hash(f"{seed}\n{_key(document)}"))
    held_out = [_hash(_key(document)) < fraction * 2**256 for document in ordered]
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
    head = text_head(tokenizer)
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


def token_digest(batches: Iterable[Tensor | Sequence[Tensor]]) -> str:
    """sha256 over token ids: little-endian int64, every window preceded by its length."""
    digest = hashlib.sha256()
    for window in chain.from_iterable(batches):
        digest.update(len(window).to_bytes(8, "little"))
        digest.update(window.to(torch.int64).contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def _key(document: str) -> str:
    return document.key if isinstance(document, Conversation) else document


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


def text_head(tokenizer: Any) -> list[int]:
    """Token ids that the tokenizer puts before every text (BOS), often none."""
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
        raise BadInput(f"{path} is a directory, not a text file", "name the files in it, each with --text")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadInput(f"{path} is larger than {MAX_BYTES >> 30} GiB", "give a sample of it")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # a device has no size and no end
        if len(data) > MAX_BYTES:
            raise BadInput(f"{path} is larger than {MAX_BYTES >> 30} GiB", "give a sample of it")
    except FileNotFoundError:
        raise NotFound(f"no such text file: {path}", "check the path that --text names") from None
    except PermissionError:
        raise AccessDenied(f"{path} may not be read", "check who owns it") from None
    if b"\0" in data:
        raise BadInput(f"{path} is binary, not text", "give UTF-8 text, or JSON lines with a text field")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text (byte {error.start})", "convert it to UTF-8") from None
    if not text.strip():
        raise BadInput(f"{path} holds no text", "give a file with text in it")
    return text


def _documents(path: Path, text: str, tokenizer: Any) -> list[str]:
    if path.suffix in (".jsonl", ".ndjson"):
        return documents_of(_json_lines(text), str(path), tokenizer)
    most: list[str] = []
    for separator in _SEPARATORS:
        blocks = re.split(separator, text)
        found = [block for block in (_OPENING_TAG.sub("", b).strip() for b in blocks) if block]
        if len(found) >= ENOUGH_DOCUMENTS:
            return found
        if len(found) > len(most):
            most = found
    return most


def _json_lines(text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() also cuts at U+2028, legal in JSON
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError):
                yield number, None


def documents_of(records: Iterable[tuple[int, Any]], where: str, tokenizer: Any) -> list[str]:
    """The documents of numbered records: their "text", or their "messages" by the chat template.

    Errors: `BadInput` naming `where` and the record.
    """
    found: list[str] = []
    for number, value in records:
        document = value.get("text") if isinstance(value, dict) else None
        if isinstance(value, dict) and document is None and "messages" in value:
            document = _conversation(value["messages"], f"line {number} of {where}", tokenizer)
        if not isinstance(document, str):
            raise BadInput(
                f'line {number} of {where} is not an object with a "text" string or a list of "messages"',
                'each line is one record: {"text": "..."}',
            )
        if document.strip():
            found.append(document if isinstance(document, Conversation) else _clean(document))
    if not found:
        raise BadInput(f"{where} holds no text", 'its records need a "text" that is not empty')
    return found


def _clean(text: str) -> str:
    # JSON may escape half a surrogate pair, which no tokenizer takes.
    return text.strip().encode("utf-8", "replace").decode()


def _conversation(messages: Any, where: str, tokenizer: Any) -> Conversation:
    whole = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in messages
    )
    if not whole or not messages:
        raise BadInput(
            f'{where}: every message needs a "role" and a "content" string',
            '{"messages": [{"role": "user", "content": "..."}]}',
        )
    if getattr(tokenizer, "chat_template", None) is None:
        raise BadInput(
            f"{where} is a conversation, and the source's tokenizer has no chat template",
            'give records with "text", or an instruction-tuned source',
        )
    turns = [{"role": m["role"], "content": _clean(m["content"])} for m in messages]
    try:
        written = Conversation(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception as error:  # a template is a program of its own, and refuses in its own ways
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(
            f"{where}: the chat template refuses it: {reason[:120]}",
            'leave the conversation out, or give its text as "text"',
        ) from None
    written.key = json.dumps(turns, sort_keys=True)
    return written
