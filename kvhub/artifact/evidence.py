"""`evidence.json` beside the manifest: read for one digest only, written whole."""

from __future__ import annotations

from pathlib import Path

from kvhub.artifact.beside import read_beside, write_beside
from kvhub.artifact.layout import EVIDENCE, EVIDENCE_LIMIT
from kvhub.artifact.manifest import Manifest
from kvhub.evaluation.evidence import Evidence


def read_evidence(directory: Path, manifest: Manifest) -> Evidence | None:
    """The evidence beside `manifest`, or None where there is none. Errors: those of `read_beside`."""
    return read_beside(directory, EVIDENCE, manifest, Evidence, limit=EVIDENCE_LIMIT, what="the evidence was")


def write_evidence(directory: Path, evidence: Evidence) -> None:
    """Put `evidence.json` into an artifact directory. Errors: those of `write_beside`."""
    write_beside(directory, EVIDENCE, evidence.to_bytes())
