"""A mapper made here, into the store: written beside its place, then moved there and registered."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from kvhub.artifact.manifest import Manifest
from kvhub.artifact.write import write_artifact
from kvhub.hub.store import exclusive
from kvhub.settings import Settings
from kvhub.store.entry import enter


def add(
    manifest: Manifest, tensors: Mapping[str, Tensor], settings: Settings, *, tag: str
) -> tuple[Path, Manifest]:
    """Write `manifest` (without files) and `tensors` to `KVHUB_HOME/mappers/<digest>`, as a draft.

    tag: names the staging directory, so that what a killed process left is found and removed.
    Errors: those of `write_artifact` and `register`.
    """
    settings.mappers.mkdir(mode=0o700, parents=True, exist_ok=True)
    place = settings.mappers / f".{tag}"
    with exclusive(settings.mappers):
        shutil.rmtree(place, ignore_errors=True)
        try:
            written = write_artifact(place, manifest, tensors)
            final = settings.mappers / written.digest
            fresh = not final.exists()
            if fresh:
                place.rename(final)
            enter(final, written, settings, fresh=fresh)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return final, written
