"""The weights of k_norm, from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
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


def test_weights_of_another_shape(tmp_path: Path) -> None:
    """Those of OLMo2's norm are for all heads at once; or some are absent, or of another model."""
    loaded = load_model(make_tiny(tmp_path / "m"), torch.float32)
    (file,) = loaded.path.glob("*.safetensors")
    whole, name = load_file(file), "model.layers.1.self_attn.k_norm.weight"
    for tensors in (
        {name: torch.ones(2 * 16)},
        {name: torch.ones(2, 16)},
        {name: None},
    ):
        save_file({k: v for k, v in (whole | tensors).items() if v is not None}, file)
        with pytest.raises(Incompatible, match="no k_norm of one weight a dimension") as caught:
            k_norm_weights(loaded.path, loaded.identity)
        assert caught.value.code == "k_norm"
    save_file(whole, file)
    with pytest.raises(Incompatible, match="k_norm"):
        k_norm_weights(loaded.path, make_identity(k_norm=True))


def test_a_file_that_cannot_be_read_is_no_other_norm(tmp_path: Path) -> None:
    loaded = load_model(make_tiny(tmp_path / "m"), torch.float32)
    (file,) = loaded.path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-4096])
    with pytest.raises(Corrupt):
        k_norm_weights(loaded.path, loaded.identity)
