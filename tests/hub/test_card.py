"""The card: everything from manifest and evidence, nothing that steers a reader."""

from __future__ import annotations

from pathlib import Path

import yaml
from support.mappers import make_identity, make_manifest
from support.published import make_artifact, make_evidence

from kvhub.evaluation.gate import rejudge
from kvhub.hub.card import card, front_matter, tag


def test_front_matter_says_the_direction_and_declares_no_licence_by_itself(tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path / "a", source="Qwen/Qwen3-8B", target="Qwen/Qwen3-32B")
    front = front_matter(manifest, make_evidence(manifest), "org/mapper")
    assert front["base_model"] == ["Qwen/Qwen3-32B", "Qwen/Qwen3-8B"]
    assert front["base_model_relation"] == "adapter"
    assert {"kvhub-source:qwen3-8b", "kvhub-target:qwen3-32b", "kvhub-format:1"} <= set(front["tags"])
    assert "license" not in front
    assert "pipeline_tag" not in front
    assert front_matter(manifest, None, "org/mapper", licence="mit")["license"] == "mit"
    assert "model-index" not in front_matter(manifest, None, "org/mapper")


def test_a_local_model_is_no_base_model_of_the_hub() -> None:
    local = make_identity("models/small").model_copy(update={"revision": "fingerprint:" + "0" * 64})
    front = front_matter(make_manifest(local, make_identity("org/b")), None, "org/m")
    assert front["base_model"] == ["org/b"]


def test_scores_controls_intervals_and_digests_are_all_there(tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path / "a")
    evidence = make_evidence(manifest)
    text = card(manifest, evidence, rejudge(evidence, manifest), "org/mapper", images=["r2.png"])
    for needed in (
        "| wiki | nll | wrong-document | 3.2000 | 3.1900 .. 3.2100 | 512 |",
        "| all | top1 | mapped | 0.9500 |",
        manifest.digest,
        manifest.files[0].sha256,
        "kvhub pull org/mapper",
        "![r2.png](assets/r2.png)",
        "It passes",
    ):
        assert needed in text, needed
    failing = make_evidence(manifest, top1=0.5)
    assert "does not pass kvhub's gate:** top1 0.5" in card(
        manifest, failing, rejudge(failing, manifest), "org/m"
    )


def test_hostile_names_stay_text() -> None:
    name = '--- <script>alert(1)</script> [a](javascript:b) `c` | d"'
    manifest = make_manifest(make_identity(name), make_identity("org/b"))
    dataset = "x\n---\nlicense: evil\n---\n\x1b[31m\u202e| <img src=x>"
    calibration = manifest.calibration.model_copy(update={"dataset": dataset})
    text = card(manifest.model_copy(update={"calibration": calibration}), None, None, "org/m")
    front, body = text.removeprefix("---\n").split("\n---\n", 1)
    assert "license" not in yaml.safe_load(front)
    assert yaml.safe_load(front)["kvhub"]["source"]["name"] == name
    assert not any(
        bad in body for bad in ("\x1b", "\u202e", "<script>", "<img src=x>", "](javascript", "\n---\n")
    )


def test_tags_are_safe() -> None:
    assert tag("Qwen/Qwen3-32B") == "qwen3-32b"
    assert tag("/home/me/models/Large v2/") == "large-v2"
    assert tag("///") == tag("模型") == "unnamed"
