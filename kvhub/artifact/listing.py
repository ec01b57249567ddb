"""The files that a manifest lists: exactly one mapper's, of the size its geometry asks for."""

from __future__ import annotations

from kvhub.artifact.layout import MANIFEST, SMALL_FILE_LIMIT, shard_names
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.tensors import tensor_bytes
from kvhub.errors import Corrupt
from kvhub.model.headers import HEADER_LIMIT


def weight_shards(manifest: Manifest) -> list[str]:
    """The safetensors files of the artifact, in order. Errors: `Corrupt`."""
    shards = shard_names({entry.name for entry in manifest.files})
    if shards is None:
        raise Corrupt(f"{MANIFEST}: the files listed are not those of one mapper")
    return shards


def check_listing(manifest: Manifest) -> None:
    """Refuse (`Corrupt`) sizes that do not fit the geometry, before anything is allocated by either."""
    shards = set(weight_shards(manifest))
    stored = sum(entry.size for entry in manifest.files if entry.name in shards)
    needed = tensor_bytes(manifest)
    if not needed < stored <= needed + len(shards) * (HEADER_LIMIT + 8):
        raise Corrupt(f"{MANIFEST}: {stored} bytes of weights are listed, the geometry asks for {needed}")
    for entry in manifest.files:
        if entry.name not in shards and entry.size > SMALL_FILE_LIMIT:
            raise Corrupt(f"{MANIFEST}: {entry.name} is listed with {entry.size} bytes")
