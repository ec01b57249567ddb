"""Evidence is bound to one digest."""

from __future__ import annotations

import json

import pytest
from support.mappers import make_identity, make_manifest, random_tensors

from kvhub.artifact.evidence import read_evidence, write_evidence
from kvhub.artifact.read import verify_artifact
from kvhub.artifact.write import write_artifact
from kvhub.errors import Corrupt, Incompatible, NotFound
from kvhub.evaluation.evidence import Evidence, Score, Verdict


def make(digest, **changes):
    values = {
        "mapper": digest,
        "kvhub_version": "0.1.0",
        "created": "2026-01-01T00:00:00Z",
        "protocol": "prefix=8 tail=4",
        "text": "d" * 64,
        "windows": 1,
        "exact_prefix": 0,
        "injection_max_logit_error": 0.0,
        "scores": [Score(metric="kl", arm="mapped", domain="all", value=0.5, low=0.4, high=0.6, n=7)],
        "verdict": Verdict(passed=True, checks=[]),
    }
    return Evidence(**(values | changes))


@pytest.fixture
def artifact(tmp_path):
    manifest = make_manifest(make_identity(), make_identity())
    return tmp_path / "m", write_artifact(tmp_path / "m", manifest, random_tensors(manifest))


def test_round_trip_and_replace(artifact):
    path, manifest = artifact
    assert read_evidence(path, manifest) is None
    for windows in (1, 2):
        evidence = make(manifest.digest, windows=windows)
        write_evidence(path, evidence)
        assert read_evidence(path, manifest) == evidence
    assert verify_artifact(path, deep=True).digest == manifest.digest
    assert [item.name for item in path.parent.iterdir()] == ["m"]


def test_of_another_mapper(artifact):
    path, manifest = artifact
    write_evidence(path, make("e" * 64))
    with pytest.raises(Corrupt, match="another mapper"):
        read_evidence(path, manifest)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b'{"schema_version":1}', b'{"mapper":"x","mapper":"y"}', b"[" * 99_999, b"x" * (17 << 20)],
    ids=["empty", "half", "keys missing", "twice", "deep", "large"],
)
def test_damaged(artifact, data):
    path, manifest = artifact
    (path / "evidence.json").write_bytes(data)
    with pytest.raises(Corrupt) as caught:
        read_evidence(path, manifest)
    assert "\n" not in caught.value.message


def test_newer(artifact):
    path, manifest = artifact
    content = json.loads(make(manifest.digest).to_bytes()) | {"schema_version": 2}
    (path / "evidence.json").write_text(json.dumps(content))
    with pytest.raises(Incompatible):
        read_evidence(path, manifest)


def test_symlink(artifact, tmp_path):
    path, manifest = artifact
    (tmp_path / "e.json").write_bytes(make(manifest.digest).to_bytes())
    (path / "evidence.json").symlink_to(tmp_path / "e.json")
    with pytest.raises(Corrupt):
        read_evidence(path, manifest)


def test_no_directory(tmp_path):
    with pytest.raises(NotFound):
        write_evidence(tmp_path / "absent", make("e" * 64))
