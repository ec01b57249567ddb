"""Which models kvhub understands, from `config.json` alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvhub.errors import BadInput, Incompatible, NotFound
from kvhub.model.quiet import quietly
from kvhub.model.rope_given import demand_rope, named
from kvhub.strict_json import parse_object, read_bounded, shown

CONFIG_LIMIT = 4 << 20


class Architecture(NamedTuple):
    """What kvhub must know about a model type that its config does not say."""

    name: str
    pairing: Literal["half", "interleaved"] = "half"
    partial: bool = False
    """Whether RoPE may turn only the first part of a head."""


ARCHITECTURES = {
    "cohere": Architecture("CohereForCausalLM", "interleaved"),
    "glm": Architecture("GlmForCausalLM", "interleaved", partial=True),
    "glm4": Architecture("Glm4ForCausalLM", "interleaved", partial=True),
    "llama": Architecture("LlamaForCausalLM"),
    "mistral": Architecture("MistralForCausalLM"),
    "phi3": Architecture("Phi3ForCausalLM", partial=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3_moe": Architecture("Qwen3MoeForCausalLM"),
}
"""By `model_type`. Decoders with one dense KV row per token, layer and head, and one RoPE for all layers.

Each is here because a test compares the cache of a live model of its type with the description.
"""

_RECURRENT = ("mamba", "ssm", "linear_attn", "linear_attention", "recurrent", "conv_kernel", "rwkv")
_MIXED = ("layers_block_type", "block_types", "_block_types", "hybrid_override_pattern", "attn_layer_period")
_MEDIA = ("vision_config", "audio_config", "text_config", "thinker_config", "vision_tower", "mm_vision_tower")


class ModelConfig(NamedTuple):
    """A supported model's configuration, as written and as transformers standardises it."""

    raw: dict[str, Any]
    config: Any
    """`transformers.PreTrainedConfig`"""
    architecture: Architecture


def read_config(path: Path) -> ModelConfig:
    """Read `path/config.json` and refuse by name what kvhub does not understand.

    Errors: `NotFound` (no config), `Corrupt` (not JSON), `Incompatible` with code `adapter`, `multimodal`,
    `mla`, `hybrid`, `sliding_window`, `quantized_kv`, `quantized_weights`, `architecture`, `rope_theta`,
    `rope_per_layer`, `rope_partial`, `rope_unknown` or `rope_<type>`; `BadInput` for numbers that cannot be.
    """
    if (path / "adapter_config.json").exists():
        raise Incompatible(
            f"{path} is an adapter, not a model", "merge it into its base model", code="adapter"
        )
    try:
        data = read_bounded(path / "config.json", limit=CONFIG_LIMIT, follow_symlinks=True)
    except NotFound:
        raise NotFound(f"{path} has no config.json", "give a directory that transformers can load") from None
    where = f"{path / 'config.json'}"
    raw = parse_object(data, where, constants=True)  # hybrids are written with Infinity: first what it is
    _refuse_layers(path, raw)
    _refuse_quantization(path, raw)
    _refuse_type(path, raw)
    parse_object(data, where)
    architecture = ARCHITECTURES[raw["model_type"]]
    with named(str(path)):
        demand_rope(raw, model_type=raw["model_type"], partial=architecture.partial)
    _demand_numbers(path, raw)
    beside = path / "generation_config.json"  # transformers reads it with the weights
    if beside.exists():
        parse_object(read_bounded(beside, limit=CONFIG_LIMIT, follow_symlinks=True), str(beside))
    return ModelConfig(raw, _standardise(path), architecture)


def _refuse_layers(path: Path, raw: dict[str, Any]) -> None:
    """What is cached is something else than one dense row of keys and values a token, layer and head."""
    kind = shown(raw.get("model_type"), 64)
    if media := next((key for key in _MEDIA if raw.get(key)), None):
        raise Incompatible(
            f"{path}: multimodal models ({kind}, {media}) are not supported", code="multimodal"
        )
    if raw.get("kv_lora_rank"):
        raise Incompatible(f"{path}: multi-head latent attention ({kind}) is not supported", code="mla")
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise BadInput(f"{path}: layer_types in config.json is not a list")
    if raw.get("is_causal", True) is not True:
        raise Incompatible(
            f"{path}: attention to later tokens (is_causal) is not supported: rows would depend on them",
            code="not_causal",
        )
    unusual = sorted({str(item) for item in layer_types} - {"full_attention", "sliding_attention"})
    mixed = [key for key in raw if (key in _MIXED and raw[key]) or any(word in key for word in _RECURRENT)]
    if unusual or mixed or any(word in kind for word in ("mamba", "rwkv")):
        what = f" ({shown([*unusual, *mixed][0], 64)})" if unusual or mixed else ""
        raise Incompatible(
            f"{path}: {kind} has other layers than full attention{what}, not supported", code="hybrid"
        )
    if "sliding_attention" in layer_types or raw.get("sliding_window_pattern"):
        raise Incompatible(f"{path}: sliding-window attention is not supported", code="sliding_window")


def _refuse_quantization(path: Path, raw: dict[str, Any]) -> None:
    # compressed-tensors has been known to say it under a key of its own, which servers read, too
    described = raw.get("quantization_config") or raw.get("compression_config")
    beside = path / "hf_quant_config.json"  # ModelOpt
    if beside.exists():
        content = parse_object(read_bounded(beside, limit=CONFIG_LIMIT, follow_symlinks=True), str(beside))
        described = {**(described if isinstance(described, dict) else {}), **content}
    if not described:
        return
    if isinstance(described, dict) and any(
        key.startswith("kv_cache") and value for key, value in _items(described)
    ):
        raise Incompatible(
            f"{path}: a quantised KV cache is not supported",
            "kvhub maps rows of bfloat16, float16 or float32",
            code="quantized_kv",
        )
    raise Incompatible(f"{path}: quantised weights are not supported", code="quantized_weights")


def _items(described: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in described.items():
        yield key, value
        if isinstance(value, dict):
            yield from value.items()


def _refuse_type(path: Path, raw: dict[str, Any]) -> None:
    kind = shown(raw.get("model_type"), 64)
    known = ", ".join(sorted(ARCHITECTURES))
    if kind not in ARCHITECTURES:
        raise Incompatible(
            f"{path}: model type {kind!r} is not supported", f"known: {known}", code="architecture"
        )
    named = raw.get("architectures") or [ARCHITECTURES[kind].name]
    if named != [ARCHITECTURES[kind].name]:
        raise Incompatible(
            f"{path}: architecture {shown(named, 80)} is not a plain {kind}", code="architecture"
        )


_LARGEST = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "hidden_size": 1 << 20,
    "max_position_embeddings": 1 << 31,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "num_experts_per_tok": 4096,
    "moe_intermediate_size": 1 << 20,
    "decoder_sparse_step": 1024,
    "num_labels": 1 << 20,
    "sliding_window": 1 << 31,
}
"""As in `Geometry`; more layers than that, and transformers would make a list of them."""
_OR_NONE = ("num_key_value_heads", "head_dim", "sliding_window")
_TRAINED = "write what the model was trained with, or fetch the model again"
_SMALL = ("rms_norm_eps", "layer_norm_eps")
_ANSWERS = {"output_attentions": False, "return_dict": True}
"""What the output of a forward must be for kvhub to read it."""
_DTYPES = (None, "auto", "float32", "bfloat16", "float16")


def _demand_numbers(path: Path, raw: dict[str, Any]) -> None:
    """The numbers that KV geometry and the layers rest on, where config.json names them."""
    for key, largest in _LARGEST.items():
        value = raw.get(key, 1)
        if value is None and key in _OR_NONE:
            continue
        if type(value) is not int or not 0 < value <= largest:
            raise BadInput(
                f"{path}: {key} in config.json must be a whole number of 1 to {largest}, got"
                f" {shown(repr(value), 64)}",
                _TRAINED,
            )
    for key in _SMALL:
        value = raw.get(key, 0)
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise BadInput(
                f"{path}: {key} in config.json must be a number of 0 to 1, got {shown(repr(value), 64)}",
                _TRAINED,
            )
    if type(scale := raw.get("logit_scale", 1)) not in (int, float):
        raise BadInput(
            f"{path}: logit_scale in config.json must be a number, got {shown(repr(scale), 64)}", _TRAINED
        )
    for key, wanted in _ANSWERS.items():
        if raw.get(key, wanted) not in (wanted, None):
            raise BadInput(
                f"{path}: {key} in config.json must be {str(wanted).lower()}, got {shown(raw[key], 64)}",
                "correct it, or leave it out",
            )
    for key in ("dtype", "torch_dtype"):
        if raw.get(key) not in _DTYPES:
            raise BadInput(
                f"{path}: {key} in config.json is {shown(repr(raw[key]), 64)}, and kvhub maps rows of"
                " bfloat16, float16 or float32",
                "convert the model",
            )


def _standardise(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        with quietly():
            config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a bad config
        # Of a validation error the first line says only which validator it was.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise BadInput(
            f"{path}: config.json cannot be used: {shown(reason)}", "correct it, or fetch the model again"
        ) from error
    if config.model_type not in ARCHITECTURES:  # transformers may take one kind for another
        raise Incompatible(f"{path}: transformers reads it as {config.model_type!r}", code="architecture")
    if "sliding_attention" in (getattr(config, "layer_types", None) or []) or _slides(config):
        raise Incompatible(f"{path}: sliding-window attention is not supported", code="sliding_window")
    return config


def _slides(config: Any) -> bool:
    """Whether a window ever hides a token: one as long as the context (Phi-4-mini) does not."""
    window = getattr(config, "sliding_window", None)
    return window is not None and not (
        isinstance(window, int) and window >= getattr(config, "max_position_embeddings", window + 1)
    )
