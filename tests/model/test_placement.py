"""A model spread by accelerate computes the same caches, and a fit over it the same artifact."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from support.prose import write_text
from support.tiny import make_tiny

from kvhub.artifact.write import write_artifact
from kvhub.diagnostics.observe import observe
from kvhub.errors import BadInput
from kvhub.evaluation.run import EvalSettings, evaluate
from kvhub.fit.calibration import calibration_set, load_corpora
from kvhub.fit.capture import capture
from kvhub.fit.distill.schedule import Distill
from kvhub.fit.run import fit_pair
from kvhub.fit.settings import DEFAULT_RECIPE, FitSettings
from kvhub.mapper.load import load_mapper
from kvhub.model.load import Sharded, load_model
from kvhub.model.placement import input_device, layer_device, weight_bytes


def spread(path, tmp_path, **memory):
    return load_model(path, torch.float32, device=Sharded(memory or {"cpu": 260_000}, tmp_path / "offload"))


def test_the_same_caches_from_weights_on_disk(tmp_path):
    path = make_tiny(tmp_path / "m", layers=4)
    whole, parts = load_model(path, torch.float32), spread(path, tmp_path)
    assert set(parts.model.hf_device_map.values()) == {"cpu", "disk"}
    away = [p for p in parts.model.parameters() if p.device.type == "meta"]
    assert len(away) > 5  # most of it is not in memory
    assert parts.identity == whole.identity and input_device(parts.model) == torch.device("cpu")
    tokens = torch.arange(5, 69)
    one, other = capture(whole, tokens), capture(parts, tokens)
    for kind in ("content_keys", "keys", "values"):
        for a, b in zip(getattr(one, kind), getattr(other, kind), strict=True):
            assert torch.equal(a, b)


def test_the_same_artifact_and_the_same_evidence(tmp_path):
    """The default recipe: gradients flow through a target whose weights are fetched from disk."""
    paths = make_tiny(tmp_path / "a"), make_tiny(tmp_path / "b", layers=4, head_dim=24, seed=1)
    settings = FitSettings(
        k=2,
        sequences=20,
        length=64,
        stride=2,
        store_dtype="float32",
        created="2026-01-01T00:00:00Z",
        recipe="default",
        train=Distill(steps=3),
        **DEFAULT_RECIPE,
    )
    corpora = load_corpora([write_text(tmp_path / "text.txt", 300)])
    found, judged = [], []
    # All on disk: the model itself then says that it is on no device.
    for load in (lambda path: load_model(path, torch.float32), lambda path: spread(path, tmp_path, cpu=1000)):
        source, target = (load(path) for path in paths)
        windows = calibration_set(corpora, source.tokenizer, sequences=20, length=64, tuning=settings.tunes)
        found.append(fit_pair(source, target, windows, settings)[0])
        directory = tmp_path / f"mapper-{len(found)}"
        write_artifact(directory, found[-1].manifest, found[-1].tensors)
        text = {"one": windows.held_out[:3]}
        judged.append(evaluate(load_mapper(directory), source, target, text, EvalSettings(tail=16)))
    assert target.model.device.type == "meta" and found[0].manifest.training is not None
    assert found[0].manifest == found[1].manifest
    assert all(torch.equal(found[0].tensors[name], found[1].tensors[name]) for name in found[0].tensors)
    assert judged[0].scores == judged[1].scores
    with pytest.raises(BadInput, match="not all in memory"):
        observe(source, target, windows.held_out[0], 16)  # it would read weights that are not there


def test_where_a_layer_is_computed():
    """By accelerate's map, over several devices; what lies in memory or on disk comes to the first one."""
    spread = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.layers.10": "disk"}
    model = SimpleNamespace(hf_device_map={**spread, "model.layers.2.mlp": 1, "lm_head": "cpu"})
    assert [layer_device(model, n) for n in (0, 1, 10)] == [torch.device("cuda", n) for n in (0, 1, 0)]
    assert layer_device(SimpleNamespace(hf_device_map={"": 1}), 5) == torch.device("cuda", 1)
    assert layer_device(SimpleNamespace(hf_device_map={"": "cpu"}), 5) == torch.device("cpu")
    assert layer_device(SimpleNamespace(device="cpu"), 5) == torch.device("cpu")


def test_bytes_of_the_weights_as_they_are_loaded(tmp_path):
    path = make_tiny(tmp_path / "m")
    numbers = sum(p.numel() for p in load_model(path).model.parameters())
    assert weight_bytes(path, None) == weight_bytes(path, torch.float32) == 4 * numbers
    assert weight_bytes(path, torch.bfloat16) == 2 * numbers
    config = json.loads((path / "config.json").read_text())
    config.pop("dtype"), config.pop("torch_dtype", None)
    (path / "config.json").write_text(json.dumps(config))
    assert weight_bytes(path, None) == 4 * numbers


def test_negative_memory(tmp_path):
    with pytest.raises(BadInput, match="negative"):
        spread(make_tiny(tmp_path / "m"), tmp_path, cpu=-1)
