"""The row of a mapper whose files have just come into the store."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvhub.artifact.manifest import Manifest
from kvhub.catalog import register
from kvhub.settings import Settings
from kvhub.store import blobs


def enter(final: Path, manifest: Manifest, settings: Settings, *, fresh: bool) -> None:
    """Register the files at `final`; under the store's lock.

    fresh: they were put there under this lock, so nobody else relies on them, and where the row cannot be
    written they go again. Errors: those of `register`.
    """
    try:
        register(final, manifest, settings)
    except BaseException:
        if fresh:
            shutil.rmtree(final, ignore_errors=True)
            blobs.drop(manifest.files, settings)
        raise
