"""The state of a registered mapper from the evidence that stands beside it."""

from __future__ import annotations

from kvhub.artifact.manifest import Manifest
from kvhub.catalog import all_scores, demote, find, record_evidence
from kvhub.evaluation.evidence import Evidence
from kvhub.evaluation.gate import reason, rejudge
from kvhub.settings import Settings
from kvhub_registry import UNJUDGED, State


def judge(manifest: Manifest, evidence: Evidence | None, settings: Settings, *, why: str = "") -> None:
    """Give the row the verdict of this evidence, where it does not have that yet; under the store's lock.

    A process may have been killed between the row and its verdict, the registry may have been lost, or a
    fault that made the mapper a draft may be repaired: so whoever has just checked the files asks.
    why: what the verdict is of, as `the evidence of org/name@commit`; else only the gate's reason is given.
    Errors: those of `record_evidence`.
    """
    row = find(manifest.digest, settings)
    if evidence is None:
        if row.state is State.READY:
            demote(row.digest, "its evidence is gone", settings)
        return
    verdict = rejudge(evidence, manifest)
    state = State.READY if verdict.passed else State.DRAFT
    judged = row.state is State.RETIRED or (row.state is state and row.state_reason != UNJUDGED)
    if judged and set(row.scores) == set(all_scores(manifest, evidence)):
        return
    said = f"{why} {'passes' if verdict.passed else 'does not pass'} the gate" if why else reason(verdict)
    record_evidence(manifest, evidence.model_copy(update={"verdict": verdict}), why=said, settings=settings)
