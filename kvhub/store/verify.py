"""What `kvhub verify` looks at: files, evidence, signature, and whether the registry says the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvhub.artifact.evidence import read_evidence
from kvhub.artifact.layout import EVIDENCE
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.read import verify_artifact
from kvhub.errors import Corrupt, Incompatible
from kvhub.evaluation.evidence import Evidence
from kvhub.evaluation.gate import reason, rejudge
from kvhub.settings import Settings
from kvhub.store.trust import Provenance, demand, load
from kvhub_registry import MapperRow, State

UNCOVERED = ("README.md", "assets")


@dataclass(frozen=True)
class Verified:
    """What was found. `evidence` is in words; `unread`: what stands there and nothing vouches for."""

    manifest: Manifest
    evidence: str
    provenance: Provenance
    unread: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(
    directory: Path, row: MapperRow | None, *, deep: bool, settings: Settings | None = None
) -> Verified:
    """Check an artifact and what stands beside it.

    row: the registry's, where it has these files; then a mapper that is `ready` must have evidence that
    passes the gate, for it is served on the strength of that.
    Errors: `Corrupt`; `Incompatible` with code `gate`, `unevaluated`, `signature` or `schema`; `BadInput`
    for a trust policy that cannot be read, whatever the files are.
    """
    load(settings)
    manifest = verify_artifact(directory, deep=deep)
    if row is not None and manifest.digest != row.digest:
        raise Corrupt(f"{directory} holds mapper {manifest.digest[:12]}, not {row.digest[:12]}")
    evidence = read_evidence(directory, manifest)
    origin = demand(directory, manifest, settings)
    said, notes = _evidence(evidence, manifest, row)
    return Verified(manifest, said, origin, [n for n in UNCOVERED if (directory / n).exists()], notes)


def _evidence(evidence: Evidence | None, manifest: Manifest, row: MapperRow | None) -> tuple[str, list[str]]:
    ready = row is not None and row.state is State.READY
    if evidence is None:
        if ready:
            raise Incompatible(
                f"mapper {manifest.digest[:12]} is ready, but its {EVIDENCE} is gone",
                "kvhub eval measures it again; kvhub pull fetches it",
                code="unevaluated",
            )
        return "none", ["no evidence yet: kvhub eval measures it"]
    verdict = rejudge(evidence, manifest)
    if ready and not verdict.passed:
        raise Incompatible(
            f"mapper {manifest.digest[:12]} is ready, but its evidence does not pass: {reason(verdict)}",
            "kvhub eval measures it again",
            code="gate",
        )
    notes = []
    measured = {(s.metric, s.arm, s.domain): s.value for s in evidence.scores}
    shown = {(s.metric, s.arm, s.domain): s.value for s in row.scores} if row is not None else measured
    if any(abs(shown.get(key, value) - value) > 1e-9 for key, value in measured.items()):
        notes.append("the registry has other scores than the file: kvhub promote takes over the file's")
    passes = "passes the gate" if verdict.passed else f"does not pass the {reason(verdict)}"
    return (
        f"of this mapper, {evidence.windows} windows, {passes}; unsigned, so judged anew wherever it is used",
        notes,
    )
