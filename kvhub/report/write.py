"""Make the report of an artifact directory."""

from __future__ import annotations

from pathlib import Path

from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.read import read_manifest
from kvhub.diagnostics.record import read_diagnostics
from kvhub.errors import AccessDenied, KvhubError
from kvhub.report.page import report_page
from kvhub.report.pictures import pictures


def write_report(directory: Path, output: Path, images: Path | None = None) -> list[Path]:
    """Write the page of the mapper in `directory` to `output`, and its PNGs into `images`; returns all paths.

    Reads the manifest, the evidence and the diagnostics; no weights and no models.
    Errors: `NotFound`, `Corrupt`, `Incompatible` for what is read; `AccessDenied`, `KvhubError` for what
    cannot be written. Nothing is left half written.
    """
    manifest = read_manifest(directory)
    evidence, diagnostics = read_evidence(directory, manifest), read_diagnostics(directory, manifest)
    made = pictures(manifest, evidence, diagnostics)
    page = report_page(manifest, evidence, diagnostics, made)
    files = [(output, page.encode())]
    if images is not None:
        files += [(images / name, data) for name, data in made.items()]
    for path, data in files:
        _put(path, data)
    return [path for path, _ in files]


def _put(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except PermissionError:
        raise AccessDenied(f"{path} may not be written") from None
    except OSError as error:
        raise KvhubError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
