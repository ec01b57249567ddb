"""Names and bounds of an artifact directory."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
EVIDENCE = "evidence.json"
SIGNATURE = "signature.json"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"

MANIFEST_LIMIT = 4 << 20
EVIDENCE_LIMIT = 16 << 20
SMALL_FILE_LIMIT = 4 << 20
"""Bytes of config.json and of the index."""

SHARD_BYTES = 512_000_000
"""Bytes at which the writer starts a new shard, between target layers."""

BESIDE = frozenset({MANIFEST, EVIDENCE, SIGNATURE, "README.md", "assets", ".gitattributes"})
"""What may stand in the directory without being listed in the manifest."""

_SHARD = re.compile(r"^model-(\d{5})-of-(\d{5})\.safetensors$")


def shard_name(index: int, count: int) -> str:
    """File name of shard `index` (from 0) of `count`, as transformers and the Hub expect it."""
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def shard_names(names: set[str]) -> list[str] | None:
    """The weight files among the listed `names`, or None where the listing is not exactly one artifact's."""
    if names == {CONFIG, shard_name(0, 1)}:
        return [shard_name(0, 1)]
    shards = sorted(name for name in names if _SHARD.match(name))
    expected = [shard_name(index, len(shards)) for index in range(len(shards))]
    complete = len(shards) > 1 and shards == expected and names == {CONFIG, INDEX, *shards}
    return shards if complete else None
