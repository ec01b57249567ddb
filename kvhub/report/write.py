"""Make the report of an artifact directory."""

from __future__ import annotations

from pathlib import Path

from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.read import read_manifest
from kvhub.diagnostics.record import read_diagnostics
from kvhub.files import check_output, write_output
from kvhub.report.page import report_page
from kvhub.report.pictures import pictures


def write_report(directory: Path, output: Path, images: Path | None = None) -> list[Path]:
    """Write the page of the mapper in `directory` to `output`, and its PNGs into `images`; returns all paths.

    Reads the manifest, the evidence and the diagnostics; no weights and no models.
    Errors: `NotFound`, `Corrupt`, `Incompatible` for what is read; `BadInput`, `AccessDenied`,
    `KvhubError` for what cannot be written. Nothing is left half written.
    """
    check_output(output)
    manifest = read_manifest(directory)
    evidence, diagnostics = read_evidence(directory, manifest), read_diagnostics(directory, manifest)
    made = pictures(manifest, evidence, diagnostics)
    page = report_page(manifest, evidence, diagnostics, made)
    files = [(output, page.encode())]
    if images is not None:
        files += [(images / name, data) for name, data in made.items()]
    for path, data in files:
        write_output(path, data)
    return [path for path, _ in files]
