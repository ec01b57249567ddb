"""Small artifacts with evidence: real files, written by the real writer."""

from __future__ import annotations

from pathlib import Path

from support.mappers import make_identity, make_manifest, random_tensors

from kvhub.artifact.evidence import write_evidence
from kvhub.artifact.manifest import Manifest
from kvhub.artifact.write import write_artifact
from kvhub.evaluation.evidence import Evidence, Score, Verdict
from kvhub.evaluation.gate import rejudge


def make_artifact(
    directory: Path, *, seed: int = 0, source: str = "org/Small-1B", target: str = "org/Large-7B"
) -> Manifest:
    """Write a mapper between two invented models; different by `seed`."""
    manifest = make_manifest(
        make_identity(source), make_identity(target, num_layers=3), created=f"2026-11-29T12:00:{seed:02d}Z"
    )
    return write_artifact(directory, manifest, random_tensors(manifest, seed))


def make_evidence(
    manifest: Manifest, *, top1: float = 0.95, created: str = "2026-11-29T13:00:00Z"
) -> Evidence:
    """Scores as an evaluation gives them; they pass the gate unless `top1` is low."""

    def score(metric: str, value: float, arm: str = "mapped", domain: str = "all") -> Score:
        return Score(
            metric=metric,
            arm=arm,  # type: ignore[arg-type]
            domain=domain,
            value=value,
            low=value - 0.01,
            high=value + 0.01,
            n=512,
        )

    nll = {"native": 2.0, "mapped": 2.1, "source": 2.4, "empty": 3.0, "wrong-document": 3.2}
    scores = [
        score("nll", value, arm, domain) for arm, value in nll.items() for domain in ("all", "wiki", "code")
    ]
    metrics = {"top1": top1, "kl": 0.05, "attention_cosine": 0.98, "gap_recovered": 0.9, "excess_nll": 0.1}
    scores += [
        score(metric, value, domain=domain)
        for metric, value in metrics.items()
        for domain in ("all", "wiki", "code")
    ]
    evidence = Evidence(
        mapper=manifest.digest,
        kvhub_version="0.1.0",
        created=created,
        protocol="prefix 64, tail 32, float32, seed 0",
        text="d" * 64,
        windows=16,
        exact_prefix=0,
        injection_max_logit_error=1e-4,
        scores=scores,
        verdict=Verdict(passed=False, checks=[]),
    )
    return evidence.model_copy(update={"verdict": rejudge(evidence, manifest)})


def publishable(directory: Path, **options: object) -> Manifest:
    """An artifact with evidence that passes."""
    manifest = make_artifact(directory, **options)  # type: ignore[arg-type]
    write_evidence(directory, make_evidence(manifest))
    return manifest


def flipped(data: bytes) -> bytes:
    """The same bytes but for one bit in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
