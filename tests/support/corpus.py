"""A corpus of hostile manifests, weights and Hub answers: each case follows from its number alone."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1e308, -0.0, "", "x", "../../etc/passwd", "/etc/passwd",
    "a\u0000b", "\x1b[31m", "\u202e", "MANIFEST.JSON", "model.safetensors", "a" * 70000, [], {}, [[]],
    [[0, 0]], [{}], {"a": {}}, [0] * 2000, "9" * 5000, "commit:main", ".", "..", "con", "a/b",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested JSON but the root."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def change(content: Any, draw: random.Random) -> Any:
    """One to three places replaced, dropped, doubled or renamed."""
    content = copy.deepcopy(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        found = list(places(content))
        if not found:
            break
        *way, key = draw.choice(found)
        inner = content
        for step in way:
            inner = inner[step]
        kind = draw.randrange(5)
        if kind == 0:
            del inner[key]
        elif kind == 1 and isinstance(inner, list):
            inner.append(copy.deepcopy(inner[key]))
        elif kind == 2 and isinstance(inner, dict):
            inner[draw.choice(("extra", str(key).upper(), "__proto__", str(key) + " "))] = inner.pop(key)
        else:
            inner[key] = copy.deepcopy(draw.choice(VALUES))
    return content


def garble(data: bytes, draw: random.Random) -> bytes:
    """Bytes flipped, cut, put in or doubled."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        kind, at = draw.randrange(5), draw.randrange(max(1, len(changed)))
        if kind == 0 and changed:
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            changed[at:at] = bytes(draw.randrange(256) for _ in range(draw.choice((1, 16, 300))))
        elif kind == 3:
            changed += changed[: 1 << 16]
        else:
            del changed[at : at + draw.choice((1, 8, 64))]
    return bytes(changed)


def manifest(good: bytes, number: int) -> bytes:
    """A hostile manifest.json."""
    draw = random.Random(f"manifest {number}")
    kind = draw.randrange(10)
    if kind < 6:
        changed = change(json.loads(good), draw)
        text = json.dumps(changed, sort_keys=True, separators=(",", ":"), ensure_ascii=draw.random() < 0.2)
        return text.encode("utf-8", "surrogatepass") + b"\n"
    if kind == 6:  # a key twice
        key = draw.choice(list(json.loads(good)))
        value = json.dumps(draw.choice(VALUES))
        return good.replace(b"{", f'{{"{key}":{value},'.encode("utf-8", "surrogatepass"), 1)
    if kind == 7:
        return b"[" * draw.choice((10, 10_000, 1_000_000))
    if kind == 8:
        return good + b" " * draw.choice((1, 5_000_000))
    return garble(good, draw)


NUMBERS = (
    10**30,
    2**63,
    2**63 - 1,
    2**53 + 1,
    -(2**63) - 1,
    -1,
    0,
    1e308,
    -1e308,
    1.7e308,
    1e300,
    1e16,
    1e13,
)


def numbers(good: Any, draw: random.Random) -> Any:
    """Well-formed JSON with one number, or all of one list of numbers, that none should be."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    content, bad = copy.deepcopy(good), draw.choice(NUMBERS)
    found = []
    for *way, key in places(content):
        inner = content
        for step in way:
            inner = inner[step]
        value = inner[key]
        if key != "schema_version" and (
            is_number(value) or (isinstance(value, list) and value and all(map(is_number, value)))
        ):
            found.append((inner, key))
    inner, key = draw.choice(found)
    inner[key] = [bad] * len(inner[key]) if isinstance(inner[key], list) else bad
    return content


def weights(good: bytes, number: int) -> bytes:
    """A hostile safetensors file."""
    draw = random.Random(f"weights {number}")
    length = struct.unpack("<Q", good[:8])[0]
    header, body = json.loads(good[8 : 8 + length]), good[8 + length :]
    kind = draw.randrange(10)
    if kind < 4:
        new = json.dumps(change(header, draw)).encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(new)) + new + body
    if kind == 4:
        return struct.pack("<Q", draw.choice((0, 1, 2**31, 2**62, 2**64 - 1, length + 1))) + good[8:]
    if kind == 5:  # a tensor twice
        name = draw.choice([name for name in header if name != "__metadata__"])
        text = json.dumps(header)
        new = (text[:-1] + f', "{name}": {json.dumps(header[name])}}}').encode()
        return struct.pack("<Q", len(new)) + new + body
    if kind == 6:  # NaN and infinity
        place = draw.randrange(len(body) // 4) * 4
        return (
            good[: 8 + length]
            + body[:place]
            + draw.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff"))
            + body[place + 4 :]
        )
    if kind == 7:
        return good + bytes(draw.choice((1, 4096)))
    return garble(good, draw)


LINKS = (
    "", "<>; rel=next", '</api/models?x=1>; rel="next"', '<file:///etc/passwd>; rel="next"', "<", "; ; ;",
    '<http://127.0.0.1:9/x>; rel="next"', '</api/models>; rel="next", </api/models>; rel="next"', "a" * 5000,
)  # fmt: skip
RETRIES = (
    "0",
    "0",
    "9" * 400,
    "-1",
    "nan",
    "0x1",
    "\xb2",
    "Wed, 21 Oct 99999999999999999999 07:28:00 GMT",
    ",",
)


def answer(
    number: int, sizes: dict[str, int], *, listing: bool = False
) -> Callable[[Request], Response | None]:
    """A Hub that answers one kind of request in a hostile way, and the others properly (None).

    listing: of `search`; else what a pull asks for.
    """
    draw = random.Random(f"answer {number}")
    where = draw.choice(("/api/models/", "/api/models/", "/resolve/", "/_blobs/"))
    if listing:
        where = "/api/models"
    kind, seed = draw.randrange(7), draw.randrange(1 << 30)
    good = {
        "id": "tester/mapper",
        "sha": "a" * 40,
        "siblings": [{"rfilename": name, "size": size, "blobId": "0" * 40} for name, size in sizes.items()],
        "tags": ["kvhub"],
        "private": False,
        "gated": False,
        "downloads": 1,
        "cardData": {
            "library_name": "kvhub",
            "base_model": ["a/b"],
            "model-index": [],
            "kvhub": {
                "digest": "b" * 64,
                "source": {"name": "a/b", "revision": "commit:" + "a" * 40},
                "mappers": [
                    {
                        "folder": "sub",
                        "digest": "c" * 64,
                        "source": "a/b",
                        "target": "c/large-7b",
                        "family": "ridge",
                        "scores": {"top1": 0.5, "kl": 0.1},
                    }
                ],
            },
        },
        "lastModified": "2026-01-01T00:00:00.000Z",
    }

    def fault(request: Request) -> Response | None:
        if where not in request.url.path:
            return None
        chosen = random.Random(seed)
        described: Any = [good] * chosen.choice((0, 1, 1, 3)) if listing else good
        headers = {
            "Retry-After": chosen.choice(RETRIES),
            "Link": chosen.choice(LINKS),
            "X-Repo-Commit": "a" * 40,
            "ETag": '"' + "0" * 40 + '"',
        }
        if kind == 0:
            status = chosen.choice((400, 401, 403, 404, 409, 410, 416, 418, 429, 500, 502, 503, 504))
            code = chosen.choice(
                ("RepoNotFound", "EntryNotFound", "RevisionNotFound", "GatedRepo", "", "\x7f")
            )
            return Response(
                b"no", status, headers=headers | {"X-Error-Code": code, "X-Error-Message": "x" * 9000}
            )
        if kind == 1:
            return Response(garble(json.dumps(described).encode(), chosen), headers=headers)
        if kind == 2:
            return Response(bytes(chosen.randrange(256) for _ in range(5000)), headers=headers)
        if kind == 3:
            location = chosen.choice(
                ("/", "http://127.0.0.1:9/x", "file:///etc/passwd", "//", request.url.path)
            )
            return Response(status_code=302, headers=headers | {"Location": location})
        if kind == 4:
            return Response(b"", headers=dict.fromkeys(headers, ""))
        changed = change(described, chosen) if kind < 6 else [described] * 3 if listing else [described]
        text = json.dumps(changed).encode("utf-8", "surrogatepass")
        return Response(text, headers=headers, media_type="application/json")

    return fault


def outside(root: Path, store: Path) -> set[str]:
    """Every path below `root` that is not in the store: a hostile mapper must add none."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_relative_to(store)}
