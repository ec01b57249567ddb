"""The whole identity: what changes it, what does not, and what is refused by name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from support.tiny import LLAMA3, make_tiny

from kvhub.errors import BadInput, Corrupt, Incompatible, NotFound
from kvhub.model.identify import check_pair, identify
from kvhub.model.identity import ModelIdentity
from kvhub.model.load import load_model


def edit(path, **changes):
    """Change config.json; a value of None removes the key."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return path


@pytest.mark.parametrize(
    ("model_type", "k_norm"),
    [("llama", False), ("mistral", False), ("qwen2", False), ("qwen3", True), ("qwen3_moe", True)],
)
def test_supported_architectures(tmp_path, model_type, k_norm):
    more = (
        {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
        if model_type == "qwen3_moe"
        else {}
    )
    loaded = load_model(make_tiny(tmp_path / "m", model_type=model_type, rope_parameters=LLAMA3, **more))
    shape = loaded.identity.geometry
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.k_norm) == (3, 2, 16, k_norm)
    assert shape.head_dim != shape.hidden_size // shape.num_attention_heads
    with torch.no_grad():
        cache = loaded.model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
    assert tuple(cache.layers[0].keys.shape) == (1, shape.num_kv_heads, 3, shape.head_dim)
    # Files alone say the same as files and the live model.
    assert identify(loaded.path, dtype="float32") == loaded.identity


def test_round_trip_as_json(tmp_path):
    found = identify(make_tiny(tmp_path / "m"), dtype="float32")
    again = ModelIdentity.model_validate_json(found.model_dump_json())
    assert again == found
    assert again.digest == found.digest


def test_stable_under_rename_copy_and_name(tmp_path):
    path = make_tiny(tmp_path / "m")
    first = identify(path, dtype="float32")
    copied = identify(shutil.copytree(path, tmp_path / "other"), dtype="float32", name="another name")
    assert first.digest == copied.digest
    assert (first.name, copied.name) == ("m", "another name")


def flip_weight(path):
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)


def change_theta(path):
    edit(path, rope_parameters={"rope_type": "default", "rope_theta": 10001.0})


def change_max_position(path):
    edit(path, max_position_embeddings=8192)


def change_token(path):
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = {
        ("Ġzz" if token == "Ġthe" else token): index for token, index in content["model"]["vocab"].items()
    }
    content["model"]["merges"] = [merge for merge in content["model"]["merges"] if "".join(merge) != "Ġthe"]
    file.write_text(json.dumps(content))


def add_token(path):
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 320, "content": "<|extra|>"})
    file.write_text(json.dumps(content))


def change_special(path):
    file = path / "tokenizer_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"pad_token": "a"}))


CHANGES = [flip_weight, change_theta, change_max_position, change_token, add_token, change_special]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_what_changes_the_identity(tmp_path, change):
    path = make_tiny(tmp_path / "m")
    before = identify(path, dtype="float32")
    change(path)
    after = identify(path, dtype="float32")
    assert after.digest != before.digest
    tokenizer_only = change in (change_token, add_token, change_special)
    assert (after.tokenizer != before.tokenizer) == tokenizer_only


def test_dtype_changes_the_identity(tmp_path):
    path = make_tiny(tmp_path / "m")
    assert identify(path, dtype="float32").digest != identify(path, dtype="bfloat16").digest
    with pytest.raises(BadInput):
        identify(path, dtype="int8")


def test_chat_template_is_shown_but_not_identity(tmp_path):
    path = make_tiny(tmp_path / "m")
    before = identify(path, dtype="float32")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    after = identify(path, dtype="float32")
    assert before.chat_template is None
    assert after.chat_template is not None
    assert after.digest == before.digest


def test_padding_of_the_embedding_is_not_vocabulary(tmp_path):
    one = identify(make_tiny(tmp_path / "a"), dtype="float32")
    two = identify(make_tiny(tmp_path / "b", vocab_size=512), dtype="float32")
    assert one.tokenizer == two.tokenizer


def test_pairs(tmp_path):
    one = identify(make_tiny(tmp_path / "a", model_type="qwen2"), dtype="float32")
    two = identify(make_tiny(tmp_path / "b", layers=2, kv_heads=4, head_dim=8), dtype="bfloat16")
    other = identify(make_tiny(tmp_path / "c", vocab=300), dtype="float32")
    check_pair(one, two)
    with pytest.raises(Incompatible) as caught:
        check_pair(one, other)
    assert caught.value.code == "tokenizer"


WINDOW = {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0, "layer_types": None}
REFUSED = [
    ({"model_type": "gemma3_text"}, "architecture"),
    ({"model_type": "gpt_neox"}, "architecture"),
    ({"model_type": "no_such_model"}, "architecture"),
    ({"architectures": ["Qwen3ForSequenceClassification"]}, "architecture"),
    ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "mla"),
    ({"layer_types": ["linear_attention", "full_attention", "full_attention"]}, "hybrid"),
    ({"layer_types": ["conv", "full_attention", "conv"], "model_type": "lfm2"}, "hybrid"),
    ({"layer_types": ["chunked_attention"] * 3}, "hybrid"),
    ({"model_type": "mamba", "ssm_cfg": {}}, "hybrid"),
    ({"model_type": "rwkv"}, "hybrid"),
    ({"model_type": "jamba", "attn_layer_period": 8}, "hybrid"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}, "hybrid"),
    ({"layer_types": ["sliding_attention"] * 3}, "sliding_window"),
    ({"model_type": "gemma3_text", "sliding_window_pattern": 6}, "sliding_window"),
    (WINDOW, "sliding_window"),
    ({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"type": "float"}}}, "quantized_kv"),
    ({"quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}}, "quantized_kv"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantized_weights"),
    ({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": None}}, "quantized_weights"),
    ({"compression_config": {"quant_method": "compressed-tensors"}}, "quantized_weights"),
    ({"quantization_config": {}, "compression_config": {"kv_cache_scheme": {"num_bits": 8}}}, "quantized_kv"),
    ({"model_type": "qwen2_5_vl", "vision_config": {"depth": 2}}, "multimodal"),
    ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "multimodal"),
    ({"model_type": "qwen2_audio", "audio_config": {"d_model": 8}}, "multimodal"),
    ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
    (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "attn_factor": 2.0}},
        "rope_unknown",
    ),
    ({"num_hidden_layers": 2, "layer_types": None}, "geometry"),
    ({"head_dim": 12}, "geometry"),
    ({"num_key_value_heads": 4}, "geometry"),
    ({"num_attention_heads": 8}, "geometry"),
]


@pytest.mark.parametrize(
    ("changes", "code"), REFUSED, ids=[f"{i}-{code}" for i, (_, code) in enumerate(REFUSED)]
)
def test_refused_by_name(tmp_path, changes, code):
    path = edit(make_tiny(tmp_path / "m"), **changes)
    for call in (lambda: identify(path, dtype="float32"), lambda: load_model(path)):
        with pytest.raises(Incompatible) as caught:
            call()
        assert caught.value.code == code
        assert "\n" not in caught.value.message


def test_mistral_window_is_refused_even_by_default(tmp_path):
    path = make_tiny(tmp_path / "m", model_type="mistral")
    identify(path, dtype="float32")
    config = json.loads((path / "config.json").read_text())
    del config["sliding_window"]  # the class then assumes 4096
    config["max_position_embeddings"] = 32768
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Incompatible) as caught:
        identify(path, dtype="float32")
    assert caught.value.code == "sliding_window"


def test_a_window_as_long_as_the_context_hides_nothing(tmp_path):
    path = make_tiny(tmp_path / "m", model_type="phi3", hidden=64, sliding_window=8192)
    assert load_model(path).identity == identify(path, dtype="float32")
    edit(path, sliding_window=2047)
    with pytest.raises(Incompatible) as caught:
        identify(path, dtype="float32")
    assert caught.value.code == "sliding_window"


@pytest.mark.parametrize("with_config", [False, True])
def test_adapter(tmp_path, with_config):
    """With a config beside it transformers would load the base model and the adapter together."""
    path = make_tiny(tmp_path / "m") if with_config else tmp_path
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(Incompatible) as caught:
        identify(path, dtype="float32")
    assert caught.value.code == "adapter"


def test_quantised_kv_beside_the_config(tmp_path):
    path = make_tiny(tmp_path / "m")
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    with pytest.raises(Incompatible) as caught:
        identify(path, dtype="float32")
    assert caught.value.code == "quantized_kv"


def test_norms_over_all_heads_are_not_one_norm_a_head(tmp_path):
    path = make_tiny(tmp_path / "m", model_type="cohere", use_qk_norm=True)
    with pytest.raises(Incompatible) as caught:
        identify(path, dtype="float32")
    assert caught.value.code == "geometry"


def test_broken_files(tmp_path):
    with pytest.raises(NotFound):
        identify(tmp_path, dtype="float32")
    path = make_tiny(tmp_path / "m")
    (path / "config.json").write_text('{"model_type": ')
    with pytest.raises(Corrupt):
        identify(path, dtype="float32")
    path = make_tiny(tmp_path / "n")
    (path / "tokenizer.json").write_text("{")
    (path / "tokenizer_config.json").unlink()
    with pytest.raises(BadInput, match="tokenizer"):
        identify(path, dtype="float32")


def test_a_cast_model_is_refused(tmp_path):
    """`.to(bfloat16)` on a whole model rounds its rotary frequencies too."""
    loaded = load_model(make_tiny(tmp_path / "m"))
    with pytest.raises(Incompatible) as caught:
        identify(loaded.path, dtype="bfloat16", model=loaded.model)
    assert caught.value.code == "dtype"
    with pytest.raises(Incompatible) as caught:
        identify(loaded.path, dtype="bfloat16", model=loaded.model.to(torch.bfloat16))
    assert caught.value.code == "rope_live"
    proper = load_model(loaded.path, torch.bfloat16)
    assert proper.identity.dtype == "bfloat16"


def test_a_changed_copy_has_its_own_digest(tmp_path):
    one = identify(make_tiny(tmp_path / "m"), dtype="float32")
    assert one.digest != one.model_copy(update={"revision": "commit:" + "1" * 40}).digest
