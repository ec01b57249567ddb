"""Which models kvhub understands, from `config.json` alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvhub.errors import BadInput, Incompatible, NotFound
from kvhub.strict_json import parse_object, read_bounded, shown

CONFIG_LIMIT = 4 << 20


class Architecture(NamedTuple):
    """What kvhub must know about a model type that its config does not say."""

    name: str
    pairing: Literal["half", "interleaved"]


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "half"),
    "mistral": Architecture("MistralForCausalLM", "half"),
    "qwen2": Architecture("Qwen2ForCausalLM", "half"),
    "qwen3": Architecture("Qwen3ForCausalLM", "half"),
    "qwen3_moe": Architecture("Qwen3MoeForCausalLM", "half"),
}
"""By `model_type`. Decoders with one dense KV row per token, layer and head, and one RoPE for all layers."""

_RECURRENT = ("mamba", "ssm", "linear_attn", "linear_attention", "recurrent", "conv_kernel")


class ModelConfig(NamedTuple):
    """A supported model's configuration, as written and as transformers standardises it."""

    raw: dict[str, Any]
    config: Any
    """`transformers.PreTrainedConfig`"""
    architecture: Architecture


def read_config(path: Path) -> ModelConfig:
    """Read `path/config.json` and refuse by name what kvhub does not understand.

    Errors: `NotFound` (no config), `Corrupt` (not JSON), `Incompatible` with code `adapter`,
    `mla`, `hybrid`, `architecture`, `quantized_kv`, `quantized_weights`, `sliding_window` or `rope_theta`.
    """
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise Incompatible(
            f"{path} is an adapter, not a model", "merge it into its base model", code="adapter"
        )
    try:
        data = read_bounded(path / "config.json", limit=CONFIG_LIMIT, follow_symlinks=True)
    except NotFound:
        raise NotFound(f"{path} has no config.json", "give a directory that transformers can load") from None
    raw = parse_object(data, f"{path / 'config.json'}")
    _refuse(path, raw)
    return ModelConfig(raw, _standardise(path), ARCHITECTURES[raw["model_type"]])


def _refuse(path: Path, raw: dict[str, Any]) -> None:
    kind = shown(raw.get("model_type"), 64)
    if raw.get("kv_lora_rank"):
        raise Incompatible(f"{path}: multi-head latent attention ({kind}) is not supported", code="mla")
    layer_types = raw.get("layer_types") or []
    unusual = {str(item) for item in layer_types} - {"full_attention", "sliding_attention"}
    if unusual or any(word in key for key in raw for word in _RECURRENT):
        raise Incompatible(f"{path}: {kind} mixes attention with other layers, not supported", code="hybrid")
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
    quantization = raw.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("kv_cache_scheme"):
        raise Incompatible(f"{path}: a quantised KV cache is not supported", code="quantized_kv")
    if quantization:
        raise Incompatible(f"{path}: quantised weights are not supported", code="quantized_weights")
    if "sliding_attention" in layer_types:
        raise Incompatible(f"{path}: sliding-window attention is not supported", code="sliding_window")
    if not any("rope_theta" in place for place in _rope_places(raw)):
        raise Incompatible(
            f"{path}: config.json does not name rope_theta",
            "add the theta that the model was trained with to config.json",
            code="rope_theta",
        )


def _rope_places(raw: dict[str, Any]) -> list[dict[str, Any]]:
    nested = [raw.get("rope_parameters"), raw.get("rope_scaling")]
    return [raw, *(place for place in nested if isinstance(place, dict))]


def _standardise(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a bad config
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{path}: config.json cannot be used: {shown(reason)}") from error
    if getattr(config, "sliding_window", None) is not None or "sliding_attention" in (
        getattr(config, "layer_types", None) or []
    ):
        raise Incompatible(f"{path}: sliding-window attention is not supported", code="sliding_window")
    return config
