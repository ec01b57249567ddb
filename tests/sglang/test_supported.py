"""SGLang's own rotary embeddings against the description, for every kind of RoPE."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.ropes import DEFAULT, LONGROPE, ROPES, YARN, make_rope

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from sglang.srt.layers.rotary_embedding import get_rope

from kvhub.model.config import read_config
from kvhub.model.engine import served_otherwise
from kvhub.model.identity import RopeSpec
from kvhub.model.load import load_model
from kvhub.model.rope import rope_spec, rotary_table
from kvhub_kernels.rotary import apply_rope
from kvhub_sglang.supported import refused_configuration, refused_rotary, refused_weights

MODELS = Path(__file__).parents[2] / "models"
SERVED = [
    name for name in ROPES if "longrope" not in name and name not in ("dynamic", "yarn attention_factor")
]


def engine(path: Path, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, RopeSpec]:
    """The module that SGLang's model classes build from this config, and our description of it."""
    config = read_config(path).config
    rope = rope_spec(config)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    partial = rope.parameters.get("partial_rotary_factor", 1.0)
    assert isinstance(partial, float)
    module = get_rope(
        width,
        rotary_dim=width,
        max_position=config.max_position_embeddings,
        base=config.rope_parameters["rope_theta"],
        is_neox_style=rope.pairing == "half",
        rope_scaling=config.rope_parameters,
        dtype=dtype,
        partial_rotary_factor=partial,
    )
    return torch.nn.ModuleList([module]), rope


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engines_table_is_the_described_one(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model, rope = engine(make_rope(tmp_path / "m", name), dtype)
    assert served_otherwise(rope) is None
    assert refused_rotary(model, rope) is None


@pytest.mark.parametrize("name", SERVED)
def test_the_engine_rotates_as_described(tmp_path: Path, name: str) -> None:
    """Not the table alone: the engine's own rotation of keys, beyond the original context."""
    model, rope = engine(make_rope(tmp_path / "m", name, max_position_embeddings=8192))
    positions = torch.tensor([0, 1, 255, 256, 257, 1023, 4095])
    keys = torch.randn(len(positions), 2, 16, generator=torch.Generator().manual_seed(3))
    module = model[0]  # type: ignore[index]
    module._ensure_cos_sin_cache_length(4095)  # as a server does for its context length
    _, found = module.forward_native(positions, keys.flatten(1).clone(), keys.flatten(1).clone())
    expected = apply_rope(keys, rotary_table(rope, positions))
    torch.testing.assert_close(found.view_as(keys), expected, rtol=0, atol=2e-3)
    assert (expected - keys).abs().max() > 0.5


OTHERWISE = {
    "dynamic NTK": ("dynamic", {}),
    "attention_factor not read": ("yarn", {"rope_parameters": YARN | {"attention_factor": 1.5}}),
    "attention_factor near its default": ("yarn", {"rope_parameters": YARN | {"attention_factor": 1.13}}),
    "LongRoPE": ("longrope", {}),
    "LongRoPE of one list": (
        "longrope",
        {"rope_parameters": LONGROPE | {"long_factor": LONGROPE["short_factor"]}},
    ),
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_where_the_engine_differs_it_is_refused(tmp_path: Path, case: str) -> None:
    name, more = OTHERWISE[case]
    model, rope = engine(make_rope(tmp_path / "m", name, **more))
    assert served_otherwise(rope) is not None
    found = refused_rotary(model, rope)
    assert found is not None
    assert "LongRoPE" in found or str(served_otherwise(rope)) in found


def test_another_width_or_pairing_is_refused(tmp_path: Path) -> None:
    half, whole = engine(make_rope(tmp_path / "a", "phi3 partial")), engine(make_rope(tmp_path / "b", "phi3"))
    turned = engine(make_rope(tmp_path / "c", "cohere interleaved"))
    assert "rotary table of shape" in str(refused_rotary(whole[0], half[1]))
    assert refused_rotary(turned[0], whole[1]) == "another pairing of rotated dimensions"
    assert refused_rotary(torch.nn.Linear(2, 2), whole[1]) == "no rotary table in the model"


@pytest.mark.parametrize(
    "other",
    [
        DEFAULT | {"rope_theta": 10500.0},
        DEFAULT | {"rope_type": "linear", "factor": 1.1},
        YARN | {"factor": 3.9},
        YARN | {"original_max_position_embeddings": 4096},
    ],
)
def test_a_table_of_other_parameters_is_refused(tmp_path: Path, other: dict[str, object]) -> None:
    kind = "yarn" if other["rope_type"] == "yarn" else "default"
    model, _ = engine(make_rope(tmp_path / "a", kind))
    _, rope = engine(make_rope(tmp_path / "b", kind, rope_parameters=other))
    assert "off" in str(refused_rotary(model, rope))


def test_partial_factor_that_the_engines_phi3_does_not_find(tmp_path: Path) -> None:
    """SGLang's class reads it beside `rope_parameters`, where transformers 5 does not write it."""
    config = read_config(make_rope(tmp_path / "m", "phi3 partial")).config
    assert config.rope_parameters["partial_rotary_factor"] == 0.75
    assert getattr(config, "partial_rotary_factor", 1) == 1


def test_weights_in_memory_must_be_those_of_the_files() -> None:
    loaded = load_model(MODELS / "small", torch.float32)
    assert refused_weights(loaded.model, MODELS / "small") is None
    assert "model.embed_tokens.weight" in str(refused_weights(loaded.model, MODELS / "large"))
    with torch.no_grad():
        loaded.model.model.layers[3].mlp.down_proj.weight[2, 5] += 1
    assert "layers.3.mlp.down_proj" in str(refused_weights(loaded.model, MODELS / "small"))


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("load_format", "dummy", "dummy"),
        ("quantization", "fp8", "quantization"),
        ("torchao_config", "int8wo", "quantization"),
        ("json_model_override_args", '{"rms_norm_eps": 0.5}', "override"),
        ("speculative_algorithm", "EAGLE", "speculative"),
        ("enable_lora", True, "LoRA"),
        ("ep_size", 2, "expert"),
        ("enable_dp_attention", True, "data-parallel attention"),
        ("pp_size", 2, "pipeline"),
        ("disaggregation_mode", "prefill", "PD"),
        ("lora_paths", ["x"], "LoRA"),
        ("attn_cp_size", 2, "attention context"),
        ("attn_dp_size", 2, "data-parallel attention"),
        ("dp_size", 2, "data parallelism"),
        ("dcp_size", 2, "decode context"),
        ("enable_streaming_session", True, "streaming sessions"),
        ("model_loader_extra_config", '{"x": 1}', "loader-extra"),
        ("custom_weight_loader", ["x"], "custom weight loader"),
    ],
)
def test_configurations_are_refused_by_name(option: str, value: object, named: str) -> None:
    plain = SimpleNamespace(load_format="auto", json_model_override_args="{}", disaggregation_mode="null")
    context = SimpleNamespace(
        server_args=plain,
        disable_radix_cache=False,
        is_hybrid_swa=False,
        is_hybrid_ssm=False,
        params=SimpleNamespace(page_size=16),
    )
    assert refused_configuration(context) is None
    setattr(plain, option, value)
    assert named in str(refused_configuration(context))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"is_hybrid_swa": True}, "sliding-window"),
        ({"is_hybrid_ssm": True}, "hybrid"),
        ({"params": SimpleNamespace(page_size=48)}, "page size 48"),
        ({"params": SimpleNamespace(page_size=128)}, "page size 128"),
        ({"server_args": SimpleNamespace(tp_size=2, nnodes=2)}, "several machines"),
        ({"server_args": SimpleNamespace(tp_size=2, enable_hierarchical_cache=True)}, "hierarchical cache"),
        ({"server_args": SimpleNamespace(tp_size=2)}, None),
        ({"server_args": SimpleNamespace(enable_hierarchical_cache=True)}, None),
    ],
)
def test_caches_and_combinations_are_refused_by_name(changes: dict[str, object], named: str | None) -> None:
    plain = {
        "server_args": SimpleNamespace(),
        "disable_radix_cache": False,
        "is_hybrid_swa": False,
        "is_hybrid_ssm": False,
        "params": SimpleNamespace(page_size=64),
    }
    found = refused_configuration(SimpleNamespace(**(plain | changes)))
    assert found is None if named is None else named in str(found)
