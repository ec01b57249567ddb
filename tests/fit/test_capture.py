from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny import LLAMA3, make_tiny

from kvhub.errors import BadInput, KvhubError
from kvhub.fit.capture import capture
from kvhub.model.load import load_model


@pytest.mark.parametrize(
    ("model_type", "rope", "dtype"),
    [
        ("qwen3", None, torch.float32),
        ("qwen2", None, torch.float32),
        ("llama", LLAMA3, torch.float32),
        ("qwen3", None, torch.bfloat16),
    ],
)
def test_content_keys_are_the_projection_before_rope(
    tmp_path: Path, model_type: str, rope: dict[str, float] | None, dtype: torch.dtype
) -> None:
    """Against the model's own modules: what k_proj (and k_norm) gave, before any rotation."""
    loaded = load_model(make_tiny(tmp_path / "m", model_type=model_type, rope_parameters=rope), dtype)
    seen: list[torch.Tensor] = []
    for layer in loaded.model.model.layers:
        attention = layer.self_attn
        module = attention.k_norm if hasattr(attention, "k_norm") else attention.k_proj
        module.register_forward_hook(lambda _m, _i, out: seen.append(out.detach().reshape(1, -1, 2, 16)[0]))
    ids = torch.arange(100) * 7 % 320
    found = capture(loaded, ids)
    assert len(found.content_keys) == len(found.keys) == len(found.values) == 3
    for content, key, value, projected in zip(
        found.content_keys, found.keys, found.values, seen, strict=True
    ):
        assert content.shape == key.shape == value.shape == (100, 2, 16)
        assert content.dtype == torch.float32 and key.dtype == value.dtype == dtype
        exact = dtype == torch.float32
        torch.testing.assert_close(
            content, projected.float(), rtol=1e-4 if exact else 2e-2, atol=1e-4 if exact else 5e-2
        )
        assert (key.float()[1:] - content[1:]).abs().max() > 0.1  # the rotation was there


def test_rows_are_all_layers_side_by_side(tmp_path: Path) -> None:
    loaded = load_model(make_tiny(tmp_path / "m"), torch.float32)
    found = capture(loaded, torch.arange(20))
    keys, values = found.rows(range(4, 20, 3))
    assert keys.dtype == values.dtype == torch.float64 and keys.shape == (6, 3 * 2 * 16)
    expected = torch.stack([layer[4::3] for layer in found.values], dim=1).flatten(1)
    assert torch.equal(values, expected.double())
    assert torch.equal(keys[2, 32:64], found.content_keys[1][10].flatten().double())


@pytest.mark.parametrize(("side", "says"), [("k_proj", "keys"), ("v_proj", "values")])
def test_nan_in_the_cache_names_the_layer(tmp_path: Path, side: str, says: str) -> None:
    loaded = load_model(make_tiny(tmp_path / "m"), torch.float32)
    getattr(loaded.model.model.layers[1].self_attn, side).weight.data[3, 5] = float("nan")
    with pytest.raises(KvhubError) as caught:
        capture(loaded, torch.arange(10))
    assert f"the {says} that m caches in layer 1" in caught.value.message


def test_a_window_beyond_the_context_is_refused(tmp_path: Path) -> None:
    loaded = load_model(make_tiny(tmp_path / "m", max_position_embeddings=32), torch.float32)
    capture(loaded, torch.arange(32))
    with pytest.raises(BadInput, match="context of m"):
        capture(loaded, torch.arange(33))
