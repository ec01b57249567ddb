"""Mappers in the store of a home."""

from __future__ import annotations

from support.published import make_artifact, make_evidence

from kvhub.artifact.evidence import write_evidence
from kvhub.artifact.manifest import Manifest
from kvhub.catalog import record_evidence, register
from kvhub.settings import Settings


def stored(settings: Settings, seed: int = 0, *, top1: float | None = 0.95, **names: str) -> Manifest:
    """A mapper in the store, evaluated unless `top1` is None."""
    place = settings.mappers / f"new-{seed}"
    manifest = make_artifact(place, seed=seed, **names)
    path = place.rename(settings.mappers / manifest.digest)
    register(path, manifest, settings)
    if top1 is not None:
        evidence = make_evidence(manifest, top1=top1)
        write_evidence(path, evidence)
        record_evidence(manifest, evidence, why="evaluated", settings=settings)
    return manifest
