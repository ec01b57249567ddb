"""RoPE against transformers' own rotary modules and functions."""

from __future__ import annotations

import copy

import pytest
import torch
from support.tiny import LLAMA3
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from kvhub.errors import BadInput, Incompatible
from kvhub.model.live import probe_positions
from kvhub.model.rope import rope_spec, rope_spec_from_module, rotary_table, same_angles
from kvhub_kernels.rotary import apply_rope, strip_rope

MODULES = {
    "llama": LlamaRotaryEmbedding,
    "mistral": MistralRotaryEmbedding,
    "qwen2": Qwen2RotaryEmbedding,
    "qwen3": Qwen3RotaryEmbedding,
    "qwen3_moe": Qwen3MoeRotaryEmbedding,
}
DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
LLAMA31 = LLAMA3 | {"original_max_position_embeddings": 8192}


def config(model_type="llama", rope=DEFAULT, **more):
    values = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 131072,
    }
    return AutoConfig.for_model(model_type, rope_parameters=dict(rope), **(values | more))


@pytest.mark.parametrize("model_type", MODULES)
@pytest.mark.parametrize("rope", [DEFAULT, LLAMA31], ids=["default", "llama3"])
def test_frequencies_are_the_live_modules_to_the_bit(model_type, rope):
    made = config(model_type, rope)
    assert rope_spec(made) == rope_spec_from_module(MODULES[model_type](made))


def test_llama3_changes_the_slow_frequencies():
    plain = rope_spec(config(rope=DEFAULT | {"rope_theta": LLAMA31["rope_theta"]}))
    scaled = rope_spec(config(rope=LLAMA31))
    assert scaled.inverse_frequencies[0] == plain.inverse_frequencies[0]
    assert scaled.inverse_frequencies[-1] == pytest.approx(plain.inverse_frequencies[-1] / 8, rel=1e-6)


@pytest.mark.parametrize("rope", [DEFAULT, LLAMA31], ids=["default", "llama3"])
@pytest.mark.parametrize("first", [0, 100_000, 1_000_000])
def test_strip_and_apply_against_transformers(rope, first):
    made = config(rope=rope)
    module = LlamaRotaryEmbedding(made)
    positions = torch.arange(first, first + 7)
    content = torch.randn(7, 2, 128, generator=torch.Generator().manual_seed(1))
    cos, sin = module(content, positions[None])
    _, rotated = apply_rotary_pos_emb(content.transpose(0, 1)[None], content.transpose(0, 1)[None], cos, sin)
    rotated = rotated[0].transpose(0, 1)

    table = rotary_table(rope_spec(made), positions)
    torch.testing.assert_close(apply_rope(content, table), rotated, rtol=0, atol=1e-6)
    torch.testing.assert_close(strip_rope(rotated, table), content, rtol=0, atol=2e-6)
    if first:
        assert (rotated - content).abs().max() > 0.5  # the rotation is not the identity here


def test_explicit_head_dim_wins_over_hidden_by_heads():
    made = config(hidden_size=256, num_attention_heads=4, head_dim=128)
    assert rope_spec(made).rotary_dim == 128


def test_old_spelling_gives_the_same_spec():
    old = AutoConfig.for_model(
        "llama",
        hidden_size=256,
        num_attention_heads=4,
        head_dim=128,
        max_position_embeddings=131072,
        rope_theta=LLAMA31["rope_theta"],
        rope_scaling={key: value for key, value in LLAMA31.items() if key != "rope_theta"},
    )
    assert rope_spec(old) == rope_spec(config(rope=LLAMA31))


def test_whole_and_fractional_theta_are_one_identity():
    one = rope_spec(config(rope=DEFAULT | {"rope_theta": 1_000_000}))
    assert one.model_dump_json() == rope_spec(config(rope=DEFAULT)).model_dump_json()


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8192}
LONG = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 8192}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **LONG}
REFUSED = [
    ({"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25}, "rope_proportional"),
    ({"rope_type": "deepseek_yarn", "rope_theta": 1e4}, "rope_deepseek_yarn"),
    (DEFAULT | {"mrope_section": [16, 24, 24]}, "rope_mrope"),
    (DEFAULT | {"partial_rotary_factor": 0.5}, "rope_partial"),
    (YARN | {"partial_rotary_factor": 0.5}, "rope_partial"),
    (DEFAULT | {"llama_4_scaling_beta": 0.1}, "rope_unknown"),
    (DEFAULT | {"factor": 4.0}, "rope_unknown"),
    ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "alpha": 1000.0}, "rope_unknown"),
    (YARN | {"attn_factor": 2.0}, "rope_unknown"),  # SGLang reads it, transformers does not
    (YARN | {"extrapolation_factor": 0.5}, "rope_unknown"),
    (LONGROPE | {"long_mscale": 1.2}, "rope_unknown"),
]


@pytest.mark.parametrize(
    ("rope", "code"), REFUSED, ids=[f"{i}-{code}" for i, (_, code) in enumerate(REFUSED)]
)
def test_other_kinds_are_refused_by_name(rope, code):
    made = config()
    made.rope_parameters = rope
    with pytest.raises(Incompatible) as caught:
        rope_spec(made)
    assert caught.value.code == code


def test_per_layer_rope_is_refused():
    made = config()
    made.rope_parameters = {"rope_type": "default", "full_attention": DEFAULT, "sliding_attention": DEFAULT}
    with pytest.raises(Incompatible) as caught:
        rope_spec(made)
    assert caught.value.code == "rope_per_layer"


def test_what_no_engine_reads_is_no_part_of_it():
    plain = rope_spec(config(rope=YARN))
    assert rope_spec(config(rope=YARN | {"attn_factor": 1.0, "finetuned": True, "mscale": None})) == plain


IMPOSSIBLE = [
    {key: value for key, value in YARN.items() if key != "factor"},
    YARN | {"factor": "4"},
    YARN | {"mscale": 0, "mscale_all_dim": 1.0},  # the engines disagree on what 0 means
    YARN | {"truncate": 1},
    YARN | {"rope_theta": 1.0},
    LONGROPE | {"short_factor": [1.0] * 63},
    LONGROPE | {"long_factor": [1.0] * 63 + [0.0]},
    LONGROPE | {"long_factor": 2.0},
    LLAMA31 | {"low_freq_factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": -1.0},
    DEFAULT | {"partial_rotary_factor": 1.5},
    DEFAULT | {"partial_rotary_factor": 0},
]


@pytest.mark.parametrize("rope", IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_impossible_parameters(rope):
    made = config()
    made.rope_parameters = rope
    with pytest.raises(BadInput) as caught:
        rope_spec(made)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("rope", [YARN, LONGROPE, DEFAULT | {"rope_type": "linear", "factor": 2.0}])
def test_specs_of_scaled_kinds_are_the_live_modules_to_the_bit(rope):
    made = config(rope=rope)
    assert rope_spec(made) == rope_spec_from_module(LlamaRotaryEmbedding(made))


@pytest.mark.parametrize("theta", [None, 0, -1.0, "1e6", True, float("nan"), float("inf")])
def test_impossible_theta(theta):
    made = config()
    made.rope_parameters = {"rope_type": "default", "rope_theta": theta}
    with pytest.raises(BadInput):
        rope_spec(made)


def test_same_angles_tolerates_the_last_bit_only():
    spec = rope_spec(config())
    moved = copy.deepcopy(spec.model_dump())
    moved["inverse_frequencies"][3] *= 1 + 1e-7
    assert same_angles(spec, type(spec)(**moved))
    moved["inverse_frequencies"][3] *= 1 + 1e-4
    assert not same_angles(spec, type(spec)(**moved))


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    "change",
    [
        {"attention_factor": 1.2},
        {"pairing": "interleaved"},
        {"max_position": 4096},  # of dynamic NTK: the limit
        {"rope_type": "default"},  # no limit
        {"rotary_dim": 64, "inverse_frequencies": [1.0] * 32},
    ],
    ids=lambda change: next(iter(change)),
)
def test_same_angles_compares_all_that_turns_a_key(change):
    spec = rope_spec(config(rope=DYNAMIC))
    other = spec.model_copy(update=change)
    assert same_angles(spec, spec)
    assert not same_angles(spec, other) and not same_angles(other, spec)


@pytest.mark.parametrize(("rope", "limit"), [(DYNAMIC, 131071), (LONGROPE, 8192)])
def test_the_limit_itself_is_refused(rope, limit):
    spec = rope_spec(config(rope=rope))
    assert spec.limit == limit
    rotary_table(spec, torch.tensor([0, limit - 1]))
    with pytest.raises(Incompatible, match=f"exact below position {limit}, not at {limit}") as caught:
        rotary_table(spec, torch.tensor([0, limit]))
    assert caught.value.code == "rope_length"


def test_rotations_are_compared_near_far_and_around_every_named_length():
    rope = rope_spec(config(rope=YARN | {"original_max_position_embeddings": 9000}))
    around = {n + d for n in (9000, 131072) for d in (-1, 0, 1)} | {17999, 262143}
    far = {0, 1, 7, 63, 1000, 4095, 8191, 32767}
    assert probe_positions(rope) == sorted(around | far)
    assert probe_positions(rope, end=9001) == [0, 1, 7, 63, 1000, 4095, 8191, 8999, 9000]
    # Below the limit of what has one, and that as closely as it may be.
    limited = probe_positions(rope_spec(config(rope=DYNAMIC | {"factor": 4.0}, max_position_embeddings=500)))
    assert limited == [0, 1, 7, 63]
    assert probe_positions(rope_spec(config(rope=LONGROPE)))[-1] == 8191
