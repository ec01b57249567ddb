"""A weight that is absent is a damaged file, whichever it is, for every command that reads the model; weights
and a config that contradict each other are refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.prose import write_text
from support.ropes import make_rope
from support.tiny import make_tiny

from kvhub.cli import run
from kvhub.errors import Corrupt, Incompatible, KvhubError
from kvhub.model.identify import describe

UNTIED = {"tie_word_embeddings": False}
LAYER = "model.layers.1."
ABSENT = [
    *(f"{LAYER}self_attn.{name}_proj.weight" for name in "qkvo"),
    f"{LAYER}self_attn.k_norm.weight",
    f"{LAYER}self_attn.q_norm.weight",
    f"{LAYER}input_layernorm.weight",
    f"{LAYER}post_attention_layernorm.weight",
    f"{LAYER}mlp.up_proj.weight",
    "model.embed_tokens.weight",
    "model.norm.weight",
    "lm_head.weight",
]


def without(path: Path, *ends: str) -> Path:
    """Take every tensor out of the file whose name ends so."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}
    assert len(kept) < len(tensors)
    save_file(kept, file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("name", ABSENT)
def test_each_by_the_command_line(
    tmp_path: Path, kvhub_home: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    broken = without(make_tiny(tmp_path / "broken", **UNTIED), name)
    whole = make_tiny(tmp_path / "whole")
    text = write_text(tmp_path / "text.txt", 200)
    for command in (
        ["check", str(whole), str(broken)],
        ["fit", str(broken), str(whole), "--text", str(text), "--k", "1"],
        ["fit", str(whole), str(broken), "--text", str(text), "--k", "1"],
    ):
        assert run(command) == 6, command
        assert f"Error: {broken}: the weights have no {name}\n" in capsys.readouterr().err
    assert not (kvhub_home / "mappers").exists()


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "o_proj", "k_norm", "input_layernorm"])
def test_of_every_layer(tmp_path: Path, part: str) -> None:
    path = without(make_tiny(tmp_path / "m"), f"{part}.weight")
    with pytest.raises(Corrupt, match=rf"the weights have no model\.layers\.0\..*{part}"):
        describe(path)


def test_projections_in_one_weight(tmp_path: Path) -> None:
    path = without(make_rope(tmp_path / "m", "phi3"), "layers.2.self_attn.qkv_proj.weight")
    with pytest.raises(Corrupt, match=r"layers\.2\.self_attn\.qkv_proj"):
        describe(path)


def test_a_layer_in_the_middle(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "m")
    file = path / "model.safetensors"
    save_file(
        {n: t for n, t in load_file(file).items() if ".layers.1." not in n}, file, metadata={"format": "pt"}
    )
    with pytest.raises(Corrupt, match=r"the weights have no model\.layers\.1\."):
        describe(path)


def test_another_number_of_layers_is_a_disagreement(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "m")
    file = path / "model.safetensors"
    save_file(
        {n: t for n, t in load_file(file).items() if ".layers.2." not in n}, file, metadata={"format": "pt"}
    )
    with pytest.raises(Incompatible) as caught:
        describe(path)
    assert caught.value.code == "geometry"


@pytest.mark.parametrize("kind", ["qwen3_moe", "cohere interleaved", "glm4 partial interleaved", "phi3"])
def test_what_is_whole_is_taken(tmp_path: Path, kind: str) -> None:
    describe(make_rope(tmp_path / "m", kind))


def contradicted(path: Path, **config: object) -> Path:
    """The model of `make_tiny` with another config."""
    make_tiny(path)
    said = path / "config.json"
    said.write_text(json.dumps(json.loads(said.read_text()) | config))
    return path


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
            r"the weights have no model\.layers\.0\.self_attn\.k_proj\.bias",
        ),
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            r"have model\.layers\.0\.self_attn\.k_norm\.weight, which a llama of this config has not",
        ),
        ({"intermediate_size": 64}, r"mlp\.\w+_proj\.weight is \[\d+, \d+\], config\.json says \[\d+, \d+\]"),
        ({"attention_bias": True}, r"no model\.layers\.0\.self_attn\.k_proj\.bias"),
        ({"vocab_size": 4096}, r"model\.embed_tokens\.weight is \[\d+, \d+\], config\.json says \[4096,"),
    ],
)
def test_a_config_that_the_weights_contradict(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    with pytest.raises(KvhubError, match=message):
        describe(contradicted(tmp_path / "m", **config))


def test_weights_of_eight_bits(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "m")
    file = path / "model.safetensors"
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, file, metadata={"format": "pt"})
    with pytest.raises(Incompatible, match=r"v_proj\.weight is F8_E4M3: quantised weights") as caught:
        describe(path)
    assert caught.value.code == "quantized_weights"


@pytest.mark.parametrize(
    "part", ["self_attn.v_proj.bias", "self_attn.o_proj.lora_A.weight", "post_feedforward_layernorm.weight"]
)
def test_weights_that_the_model_would_not_use(tmp_path: Path, part: str) -> None:
    path = make_tiny(tmp_path / "m")
    file = path / "model.safetensors"
    tensors = load_file(file)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors | buffer, file, metadata={"format": "pt"})
    describe(path)  # computed, whatever the file says
    save_file(tensors | {f"model.layers.2.{part}": torch.ones(4)}, file, metadata={"format": "pt"})
    with pytest.raises(Incompatible, match=rf"have model\.layers\.2\.{part}, which a qwen3") as caught:
        describe(path)
    assert caught.value.code == "geometry"


def test_experts_of_eight_bits(tmp_path: Path) -> None:
    path = make_rope(tmp_path / "m", "qwen3_moe")
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if ".experts." in name)
    save_file(tensors | {name: tensors[name].to(torch.int8)}, file, metadata={"format": "pt"})
    with pytest.raises(Incompatible, match="is I8: quantised weights"):
        describe(path)


def mixture(path: Path, **config: object) -> Path:
    """A mixture of four experts; config.json then says something else."""
    make_rope(path, "qwen3_moe")
    said = path / "config.json"
    said.write_text(json.dumps(json.loads(said.read_text()) | config))
    return path


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_local_experts": 5}, r"no model\.layers\.0\.mlp\.experts\.4\.down_proj\.weight"),
        ({"num_local_experts": 3}, r"have model\.layers\.0\.mlp\.experts\.3\.\w+\.weight, which a qwen3_moe"),
        ({"moe_intermediate_size": 32}, r"experts\.\d\.\w+\.weight is \[\d+, \d+\], config\.json says"),
        ({"mlp_only_layers": [1]}, r"no model\.layers\.1\.mlp\.down_proj\.weight"),
        ({"decoder_sparse_step": 2}, r"no model\.layers\.0\.mlp\.down_proj\.weight"),
        ({"num_experts_per_tok": 5}, r"asks 5 of 4 experts a token"),
        ({"num_experts_per_tok": 0}, r"num_experts_per_tok in config\.json must be a whole number"),
        ({"rms_norm_eps": -1.0}, r"rms_norm_eps in config\.json must be a number of 0 to 1"),
        ({"output_attentions": True}, r"output_attentions in config\.json must be false, got True"),
    ],
)
def test_a_config_that_the_experts_contradict(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    with pytest.raises(KvhubError, match=message):
        describe(mixture(tmp_path / "m", **config))


def test_layers_of_a_mixture_without_experts(tmp_path: Path) -> None:
    path = make_rope(tmp_path / "n", "qwen3_moe", decoder_sparse_step=2)
    describe(path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if not n.endswith("experts.2.up_proj.weight")}, file,
              metadata={"format": "pt"})  # fmt: skip
    with pytest.raises(KvhubError, match=r"no model\.layers\.1\.mlp\.experts\.2\.up_proj"):
        describe(path)


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """As they are in memory: transformers reads that, too."""
    path = make_rope(tmp_path / "m", "qwen3_moe")
    file = path / "model.safetensors"
    tensors = load_file(file)
    fused = {name: t for name, t in tensors.items() if ".experts." not in name}
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp.experts."
        gates, ups, downs = (
            torch.stack([tensors[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(4)])
            for part in ("gate", "up", "down")
        )
        fused |= {f"{prefix}gate_up_proj": torch.cat((gates, ups), 1), f"{prefix}down_proj": downs}
    save_file(fused, file, metadata={"format": "pt"})
    describe(path)
    save_file(fused | {f"{prefix}down_proj": downs[:3].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(Incompatible, match=r"experts\.down_proj is \[3, "):
        describe(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"is_causal": False}, r"attention to later tokens \(is_causal\) is not supported"),
        ({"is_causal": 0}, r"is_causal"),
        ({"return_dict": False}, r"return_dict in config\.json must be true, got False"),
        ({"num_labels": 10**9}, r"num_labels in config\.json must be a whole number"),
        ({"sliding_window": 10**30}, r"sliding_window in config\.json must be a whole number"),
        ({"logit_scale": None}, r"logit_scale in config\.json must be a number"),
        ({"dtype": "float64"}, r"dtype in config\.json is 'float64', and kvhub maps rows of"),
        (
            {
                "original_max_position_embeddings": 32,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 256,
                },
            },
            r"original_max_position_embeddings in config\.json is 32, and 256 within",
        ),
    ],
)
def test_a_config_that_no_forward_can_use(tmp_path: Path, config: dict[str, object], message: str) -> None:
    with pytest.raises(KvhubError, match=message):
        describe(contradicted(tmp_path / "m", **config))


def test_the_ends_of_a_model(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "m")
    file = path / "model.safetensors"
    tensors = load_file(file)
    for odd, message in (
        ({"model.norm.weight": torch.ones(7)}, r"model\.norm\.weight is \[7\], config\.json says \[48\]"),
        ({"lm_head.bias": torch.ones(320)}, r"have lm_head\.bias, which a qwen3 has not"),
    ):
        save_file(tensors | odd, file, metadata={"format": "pt"})
        with pytest.raises(Incompatible, match=message):
            describe(path)


@pytest.mark.parametrize("content", ["null", "[]", "{"])
def test_a_generation_config_that_is_none(tmp_path: Path, content: str) -> None:
    path = make_tiny(tmp_path / "m")
    (path / "generation_config.json").write_text(content)
    with pytest.raises(Corrupt, match=r"generation_config\.json"):
        describe(path)
