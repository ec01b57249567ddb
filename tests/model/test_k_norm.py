"""The weights of k_norm, from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.mappers import make_identity
from support.tiny import make_tiny

from kvhub.errors import Corrupt, Incompatible
from kvhub.model.k_norm import k_norm_weights
from kvhub.model.load import load_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_those_that_the_model_runs_with(tmp_path: Path, dtype: torch.dtype) -> None:
    loaded = load_model(make_tiny(tmp_path / "m", shard="20KB"), dtype)
    assert len(list(loaded.path.glob("*.safetensors"))) > 1
    found = k_norm_weights(loaded.path, loaded.identity)
    live = [layer.self_attn.k_norm.weight.float() for layer in loaded.model.model.layers]
    assert torch.equal(found, torch.stack(live))


def test_a_model_without_is_refused(tmp_path: Path) -> None:
    loaded = load_model(make_tiny(tmp_path / "m", model_type="qwen2"))
    with pytest.raises(Incompatible, match="has no k_norm") as caught:
        k_norm_weights(loaded.path, loaded.identity)
    assert caught.value.code == "k_norm"


def test_another_models_files(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "m")
    with pytest.raises(Corrupt, match="k_norm"):
        k_norm_weights(path, make_identity(k_norm=True))
