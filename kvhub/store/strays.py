"""What stands in the store without a row: a mapper that was never registered or whose row was lost, rubbish,
or a file that kvhub has not put there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import read_manifest
from kvhub.errors import AccessDenied, Corrupt, Incompatible, NotFound

Kind = Literal["unregistered", "directory", "leftover", "foreign"]

_DIGEST = re.compile(r"[0-9a-f]{64}")
_BLOB = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{12}")
_LEFTOVER = re.compile(
    r"\.(removed|fit|import|quantize|writing|pull)-.*"  # put aside, or being written
    r"|\.([0-9a-f]{64}|\.(import|quantize)-[^.]*)\.\w+"  # by `write_artifact`
)


@dataclass(frozen=True)
class Stray:
    """One thing, and what it is. `manifest`: where it is a mapper that this kvhub can read."""

    kind: Kind
    path: Path
    why: str
    manifest: Manifest | None = None


def look(path: Path) -> Stray:
    """What a path in `KVHUB_HOME/mappers` that no row names is, from its name and its manifest."""
    if _LEFTOVER.fullmatch(path.name):
        half = path.name.startswith(".removed-")
        return Stray("leftover", path, "half deleted" if half else "of a process that was killed")
    if not _DIGEST.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return Stray("foreign", path, "kvhub did not put it there")
    try:
        manifest = read_manifest(path)
    except Incompatible as error:
        return Stray("unregistered", path, error.message)
    except AccessDenied:
        return Stray("foreign", path, "it may not be read")
    except (Corrupt, NotFound):
        return Stray("directory", path, "no mapper: its manifest is missing or damaged")
    if manifest.digest != path.name:
        return Stray("foreign", path, f"it holds mapper {manifest.digest[:12]} under another name")
    return Stray("unregistered", path, f"{manifest.source.name} -> {manifest.target.name}", manifest)


def is_blob(path: Path) -> bool:
    """Whether something in `KVHUB_HOME/blobs` is called as kvhub calls a shard."""
    return bool(_BLOB.fullmatch(path.name)) and path.is_file() and not path.is_symlink()
