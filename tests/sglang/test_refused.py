"""What is refused by name: kinds of requests, KV pools, mappers at start; SGLang serves on by itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.mappers import make_identity
from support.pools import LARGE, SMALL, Engine, mapper_between, native_rows
from support.published import make_artifact, make_evidence

from kvhub.artifact.evidence import write_evidence
from kvhub.artifact.manifest import Manifest
from kvhub.errors import KvhubError
from kvhub.exchange.shards import HeadSlice
from kvhub_kernels.resident import Resident
from kvhub_sglang.backend import open_candidate, open_candidates
from kvhub_sglang.refusal import Refusal
from kvhub_sglang.settings import ServedMapper, ServingSettings
from kvhub_sglang.supported import refused_pool

MAPPER = mapper_between(SMALL, LARGE)
PROMPT = [(i * 37 + 11) % 997 for i in range(200)]

KINDS = {
    "session": (SimpleNamespace(streaming=False), "sessions"),
    "session_id": ("s", "sessions"),
    "lora_id": ("adapter", "LoRA"),
    "input_embeds": ([[0.0]], "input embeddings"),
    "positional_embed_overrides": (SimpleNamespace(), "embedding overrides"),
    "multimodal_inputs": (SimpleNamespace(), "multimodal input"),
    "beam_group": (SimpleNamespace(), "beam search"),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_requests(tmp_path: Path, name: str) -> None:
    root = tmp_path / "exchange"
    Engine(SMALL, root).run(PROMPT, 4)
    target = Engine(LARGE, root, (MAPPER,))
    blocks = len(list(root.rglob("*.kv")))
    req = target.request(PROMPT, ask={"reuse": True})
    value, said = KINDS[name]
    setattr(req, name, value)
    assert target.match(req) == 0
    [report] = req.customized_info["kvhub"]
    assert (report["reason"], report["detail"], report["prefilled"]) == ("unsupported", said, 200)
    setattr(req, name, None)  # the pools below know nothing of it
    running = target.admit(req)
    torch.testing.assert_close(target.row(running, 200), native_rows(LARGE, PROMPT, range(200)))
    target.decode(running, 2)
    setattr(req, name, value)
    target.cache.checkpoint(req, up_to=200)
    setattr(req, name, None)
    assert len(list(root.rglob("*.kv"))) == blocks
    target.drop(running)
    target.empty()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"dtype": torch.bfloat16}, "in torch.bfloat16 where the model is in float32"),
        ({"dtype": torch.float8_e4m3fn}, "float8"),
        ({"layers": 1}, "a pool of 1 layers"),
        ({"heads": 1}, "rows (1, 8)"),
        ({"dim": 16}, "rows (2, 16)"),
        ({"kind": "MLATokenToKVPool"}, "a MLATokenToKVPool"),
        ({"kind": "SWAKVPool"}, "a SWAKVPool"),
    ],
)
def test_pools(change: dict[str, Any], said: str | None) -> None:
    """A quantized cache, and models that keep something else than keys and values of every token."""
    shape = (5, change.get("heads", 2), change.get("dim", 8))
    buffers = [torch.zeros(shape, dtype=change.get("dtype", torch.float32))] * change.get("layers", 2)
    kind = type(change.get("kind", "MHATokenToKVPool"), (), {"k_buffer": buffers, "v_buffer": buffers})
    found = refused_pool(kind(), LARGE.geometry, "float32")
    assert found is None if said is None else said in str(found)


# ---- mappers at start: the others are served


@pytest.fixture
def artifact(tmp_path: Path) -> tuple[Path, Manifest]:
    manifest = make_artifact(tmp_path / "mapper")
    write_evidence(tmp_path / "mapper", make_evidence(manifest, top1=0.95))
    return tmp_path / "mapper", manifest


def opened(path: Path, manifest: Manifest, **changes: Any) -> Any:
    target, resident = changes.pop("target", manifest.target), changes.pop("resident", None)
    served = {"path": str(path), "digest": manifest.digest, "state": "ready", **changes}
    heads = HeadSlice.everything(target.geometry.num_kv_heads)
    return open_candidate(ServedMapper(**served), target, torch.device("cpu"), heads, resident)


def test_a_mapper_that_is_in_order(artifact: tuple[Path, Manifest]) -> None:
    candidate = opened(*artifact)
    assert candidate.digest == artifact[1].digest and not candidate.draft


def test_a_mapper_is_made_ready_within_the_budget_of_the_settings(artifact: tuple[Path, Manifest]) -> None:
    resident = Resident(budget=1 << 20)
    candidate = opened(*artifact, resident=resident)
    assert 0 < resident.nbytes < 1 << 20
    assert candidate.mapper.hold("cpu", torch.float32) is not None
    with pytest.raises(Refusal, match="does not fit"):
        opened(*artifact, resident=Resident(budget=resident.nbytes - 1))


def test_mappers_share_the_budget_and_leave_it_with_their_service(tmp_path: Path) -> None:
    manifests = [make_artifact(tmp_path / name) for name in "ab"]
    for name, manifest in zip("ab", manifests, strict=True):
        write_evidence(tmp_path / name, make_evidence(manifest, top1=0.95))
    target = manifests[0].target
    served = [
        ServedMapper(path=str(tmp_path / name), digest=manifest.digest, state="ready")
        for name, manifest in zip("ab", manifests, strict=True)
    ]

    def ready(budget: int | None) -> list[bool]:
        settings = ServingSettings.model_construct(mappers=served, mapper_budget=budget)
        heads = HeadSlice.everything(target.geometry.num_kv_heads)
        found = open_candidates(settings, target, torch.device("cpu"), heads)
        held = [candidate.mapper.hold("cpu", torch.float32) is not None for candidate in found]
        for candidate in found:
            candidate.mapper.let_go()
            assert budget is None or candidate.mapper.hold("cpu", torch.float32) is None
        return held

    assert ready(None) == ready(1 << 20) == [True, True]
    alone = Resident(budget=1 << 20)
    opened(tmp_path / "a", manifests[0], resident=alone)
    assert ready(alone.nbytes * 3 // 2) == [False, True]  # the second took the room of the first
    assert ready(alone.nbytes // 2) == []


def test_mappers_that_are_missing_or_damaged(artifact: tuple[Path, Manifest]) -> None:
    path, manifest = artifact
    [weights] = path.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with pytest.raises(KvhubError):
        opened(path, manifest)
    shutil.rmtree(path)
    with pytest.raises(KvhubError):
        opened(path, manifest)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"digest": "f" * 64}, "not the one named"),
        ({"target": make_identity("org/another")}, "this server runs org/another"),
        ({"state": "retired"}, "retired"),
    ],
)
def test_mappers_that_are_not_what_was_asked_for(
    artifact: tuple[Path, Manifest], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refusal, match=said):
        opened(*artifact, **changes)


@pytest.mark.parametrize("top1", [None, 0.5])
def test_mappers_without_good_evidence_serve_by_override_alone(tmp_path: Path, top1: float | None) -> None:
    """Whatever the settings file calls it."""
    path = tmp_path / "mapper"
    manifest = make_artifact(path)
    if top1 is not None:
        write_evidence(path, make_evidence(manifest, top1=top1))
    with pytest.raises(Refusal, match="evaluate it"):
        opened(path, manifest)
    assert opened(path, manifest, allow_draft=True).draft
