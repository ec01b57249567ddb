"""Configs as they are published, in older spellings, down to the angles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvhub.errors import Corrupt, Incompatible, NotFound
from kvhub.model.config import read_config
from kvhub.model.rope import rope_spec

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
PHI = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_size": 3072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48},
    "sliding_window": 262144,
}
GLM = {
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "num_hidden_layers": 40,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
}
QWEN_YARN = QWEN | {
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
}


def spec(path, config):
    (path / "config.json").write_text(json.dumps(config))
    return rope_spec(read_config(path).config)


@pytest.mark.parametrize(
    ("config", "kind", "width", "pairing", "scale", "context"),
    [
        (QWEN, "default", 128, "half", 1.0, 32768),
        (QWEN_YARN, "yarn", 128, "half", 1.1386294, 32768),
        (LLAMA, "llama3", 64, "half", 1.0, 131072),
        # sqrt(1 + ln(32) / ln(4096)), and 0.75 of a head of 128; exact to the original context.
        (PHI, "longrope", 96, "half", 1.1902380, 4096),
        (GLM, "default", 64, "interleaved", 1.0, 32768),
    ],
    ids=["qwen", "qwen yarn", "llama", "phi", "glm"],
)
def test_published_configs(tmp_path, config, kind, width, pairing, scale, context):
    found = spec(tmp_path, config)
    assert (found.rope_type, found.rotary_dim, found.pairing) == (kind, width, pairing)
    assert found.attention_factor == pytest.approx(scale, abs=1e-6)
    assert found.context == context
    assert found.parameters["rope_theta"] == config["rope_theta"]


@pytest.mark.parametrize("config", [QWEN, QWEN_YARN, LLAMA, PHI, GLM])
def test_the_new_spelling_is_the_same_rope(tmp_path, config):
    moved = {key: value for key, value in config.items() if not key.startswith("rope")}
    scaling = config.get("rope_scaling", {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    parameters = {key: value for key, value in scaling.items() if key != "type"}
    moved["rope_parameters"] = parameters | {"rope_type": kind, "rope_theta": config["rope_theta"]}
    if kind == "longrope":
        # transformers wants the length inside as well, where it then is all it reads.
        moved["rope_parameters"]["original_max_position_embeddings"] = 4096
    assert spec(tmp_path, moved) == spec(tmp_path, config)


@pytest.mark.parametrize("config", [QWEN, QWEN_YARN, LLAMA, PHI, GLM])
def test_theta_is_never_guessed(tmp_path, config):
    with pytest.raises(Incompatible) as caught:
        spec(tmp_path, {key: value for key, value in config.items() if key != "rope_theta"})
    assert caught.value.code == "rope_theta"


def test_no_config_and_no_json(tmp_path):
    with pytest.raises(NotFound):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(Corrupt):
        read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(Corrupt, match="not a regular file"):
        read_config(tmp_path)


def test_infinity_keeps_no_kind_from_being_named(tmp_path):
    """Python's own writer puts it into the config of hybrids; in one that could be used it is damage."""
    hybrid = '{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}'
    (tmp_path / "config.json").write_text(hybrid)
    with pytest.raises(Incompatible) as caught:
        read_config(tmp_path)
    assert caught.value.code == "hybrid"
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"other": float("inf")}))
    with pytest.raises(Corrupt, match="it holds Infinity"):
        read_config(tmp_path)


def test_a_number_of_too_many_digits_is_named(tmp_path: Path) -> None:
    text = json.dumps(QWEN)[:-1] + ', "vocab_size": ' + "9" * 5000 + "}"
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Corrupt, match="a number has too many digits"):
        read_config(tmp_path)
