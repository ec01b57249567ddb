"""A sample of the corpus (`python benchmarks/hub_fuzz.py` runs all of it)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from loopback_hub import LoopbackHub
from support import corpus
from support.fuzzing import Fuzz, impatient

from kvhub.artifact.read import verify_artifact
from kvhub.settings import Settings


def test_a_hundred_cases(hub: LoopbackHub, home: Settings, tmp_path: Path) -> None:
    fuzz = Fuzz(tmp_path / "fuzz", hub)
    before = corpus.outside(tmp_path / "fuzz", fuzz.settings.home)
    with impatient():
        found = Counter(fuzz.case(number) for number in range(100))
    refused = sum(count for outcome, count in found.items() if outcome.startswith("refused"))
    assert refused >= 60, found
    assert fuzz.delivered == fuzz.hub_cases == 25
    assert found["refused: KvhubError"] <= 3, found
    assert corpus.outside(tmp_path / "fuzz", fuzz.settings.home) == before
    left = {path.name for path in fuzz.settings.mappers.glob("*")}
    assert left <= {".lock", fuzz.manifest.digest}
    verify_artifact(fuzz.artifact, deep=True)
