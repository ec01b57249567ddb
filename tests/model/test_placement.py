"""A model spread by accelerate computes the same caches, and a fit over it the same artifact."""

from __future__ import annotations

import pytest
import torch
from support.prose import write_text
from support.tiny import make_tiny

from kvhub.errors import BadInput
from kvhub.fit.calibration import calibration_set, load_corpora
from kvhub.fit.capture import capture
from kvhub.fit.run import fit_pair
from kvhub.fit.settings import FitSettings
from kvhub.model.load import Sharded, load_model
from kvhub.model.placement import input_device


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


def test_the_same_artifact(tmp_path):
    paths = make_tiny(tmp_path / "a"), make_tiny(tmp_path / "b", layers=4, head_dim=24, seed=1)
    settings = FitSettings(
        k=2, sequences=20, length=64, stride=2, store_dtype="float32", created="2026-01-01T00:00:00Z"
    )
    corpora = load_corpora([write_text(tmp_path / "text.txt", 300)])
    found = []
    for load in (lambda path: load_model(path, torch.float32), lambda path: spread(path, tmp_path)):
        source, target = (load(path) for path in paths)
        windows = calibration_set(corpora, source.tokenizer, sequences=20, length=64)
        found.append(fit_pair(source, target, windows, settings)[0])
    assert found[0].manifest == found[1].manifest
    assert all(torch.equal(found[0].tensors[name], found[1].tensors[name]) for name in found[0].tensors)


def test_negative_memory(tmp_path):
    with pytest.raises(BadInput, match="negative"):
        spread(make_tiny(tmp_path / "m"), tmp_path, cpu=-1)
