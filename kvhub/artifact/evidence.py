"""`evidence.json` beside the manifest: read for one digest only, written whole."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pydantic import ValidationError

from kvhub.artifact.layout import EVIDENCE, EVIDENCE_LIMIT
from kvhub.artifact.manifest import Manifest
from kvhub.errors import AccessDenied, Corrupt, Incompatible, KvhubError, NotFound
from kvhub.evaluation.evidence import Evidence
from kvhub.strict_json import first_fault, parse_object, read_bounded


def read_evidence(directory: Path, manifest: Manifest) -> Evidence | None:
    """The evidence beside `manifest`, or None where there is none.

    Errors: `Corrupt` where it is malformed or belongs to another mapper (law 4),
    `Incompatible(code="schema")` where a newer kvhub wrote it.
    """
    try:
        data = read_bounded(directory / EVIDENCE, limit=EVIDENCE_LIMIT)
    except NotFound:
        return None
    version = parse_object(data, EVIDENCE).get("schema_version")
    if type(version) is int and version > 1:
        raise Incompatible("the evidence was made by a newer kvhub", "upgrade kvhub", code="schema")
    try:
        evidence = Evidence.model_validate_json(data)
    except ValidationError as error:
        raise Corrupt(f"{EVIDENCE}: {first_fault(error)}") from None
    if evidence.mapper != manifest.digest:
        raise Corrupt(f"{EVIDENCE} belongs to another mapper ({evidence.mapper[:12]})")
    return evidence


def write_evidence(directory: Path, evidence: Evidence) -> None:
    """Put `evidence.json` into an artifact directory, replacing what was there in one step.

    Errors: `NotFound`, `AccessDenied`, `KvhubError` (disk full); the old evidence then remains.
    """
    if not directory.is_dir():
        raise NotFound(f"no such mapper: {directory}", "kvhub list shows what is registered")
    temporary: Path | None = None
    try:
        # Outside the artifact until it is whole: a leftover inside would read as a foreign file.
        descriptor, name = tempfile.mkstemp(
            prefix=f".{directory.name[:64]}.", dir=directory.absolute().parent
        )
        temporary = Path(name)
        with open(descriptor, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(evidence.to_bytes())
            file.flush()
            os.fsync(descriptor)
        temporary.chmod(0o644)
        temporary.replace(directory / EVIDENCE)
    except PermissionError:
        raise AccessDenied(f"{directory} may not be written", "check who owns it") from None
    except OSError as error:
        raise KvhubError(f"cannot write {directory / EVIDENCE}: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
