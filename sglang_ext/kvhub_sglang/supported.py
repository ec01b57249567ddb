"""Server configurations that are refused by name: kvhub stays off, SGLang serves on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kvhub.exchange import BLOCK_TOKENS
from kvhub.model.engine import served_otherwise
from kvhub.model.fingerprint import weight_files
from kvhub.model.identity import Geometry, RopeSpec
from kvhub.model.live import probe_positions
from kvhub.model.rope import rotary_table

_ROWS = 4


def refused_configuration(ctx: Any) -> str | None:
    """Why this server cannot hand off, or None. ctx: SGLang's `TreeCacheBuildContext`."""
    args = ctx.server_args

    def value(name: str) -> Any:
        return getattr(args, name, None)

    parallel = (value("tp_size") or 1) > 1

    refusals = (
        (ctx.disable_radix_cache, "--disable-radix-cache"),
        (ctx.is_hybrid_swa, "sliding-window attention"),
        (ctx.is_hybrid_ssm, "hybrid or state-space layers"),
        (value("enable_lora") or value("lora_paths"), "LoRA"),
        (value("speculative_algorithm"), "speculative decoding"),
        (value("disaggregation_mode") not in (None, "null"), "PD disaggregation"),
        ((value("pp_size") or 1) > 1, "pipeline parallelism"),
        (parallel and (value("nnodes") or 1) > 1, "tensor parallelism over several machines"),
        (
            parallel and value("enable_hierarchical_cache"),
            "tensor parallelism with a hierarchical cache",
        ),
        ((value("ep_size") or 1) > 1, "expert parallelism"),
        ((value("attn_cp_size") or 1) > 1, "attention context parallelism"),
        (value("enable_dp_attention") or (value("attn_dp_size") or 1) > 1, "data-parallel attention"),
        ((value("dp_size") or 1) > 1, "data parallelism"),
        ((value("dcp_size") or 1) > 1, "decode context parallelism"),
        (value("enable_streaming_session"), "streaming sessions"),
        # what is computed must be what the files say: these change it behind the identity
        (value("load_format") not in (None, "auto", "safetensors"), f"--load-format {value('load_format')}"),
        (value("quantization") or value("torchao_config"), "quantization"),
        (value("json_model_override_args") not in (None, "", "{}"), "--json-model-override-args"),
        (value("model_loader_extra_config") not in (None, "", "{}"), "--model-loader-extra-config"),
        (value("custom_weight_loader"), "a custom weight loader"),
        (BLOCK_TOKENS % ctx.params.page_size, f"page size {ctx.params.page_size}"),
    )
    return next((name for condition, name in refusals if condition), None)


def refused_pool(kvcache: Any, geometry: Geometry, dtype: str, *, heads: int | None = None) -> str | None:
    """Why the live KV pool is not the one the identity describes, or None.

    heads: KV heads that this tensor-parallel rank should hold; None: all.
    """
    if type(kvcache).__name__ != "MHATokenToKVPool":
        return f"a {type(kvcache).__name__}"
    rows = (heads or geometry.num_kv_heads, geometry.head_dim)
    for buffers in (kvcache.k_buffer, kvcache.v_buffer):
        if len(buffers) != geometry.num_layers:
            return f"a pool of {len(buffers)} layers where the model has {geometry.num_layers}"
        for buffer in buffers:
            if buffer.dim() != 3 or tuple(buffer.shape[1:]) != rows:
                return f"a pool of rows {tuple(buffer.shape[1:])} where the model has {rows}"
            if str(buffer.dtype) != f"torch.{dtype}":
                return f"a KV cache in {buffer.dtype} where the model is in {dtype}"
    return None


def refused_rotary(model: Any, rope: RopeSpec) -> str | None:
    """Why the engine's own rotary table is not the one the identity describes, or None.

    The engine keeps cos and sin side by side, `[positions, rotary_dim]`.
    """
    tables = {
        id(module): module
        for module in model.modules()
        if isinstance(getattr(module, "cos_sin_cache", None), torch.Tensor)
    }
    if any(hasattr(module, "long_short_cos_sin_cache") for module in model.modules()):
        return "LongRoPE, whose factors it chooses by the longest request of a batch"
    if not tables:
        return "no rotary table in the model"
    return next((found for module in tables.values() if (found := _refused_table(module, rope))), None)


def _refused_table(module: Any, rope: RopeSpec) -> str | None:
    table = module.cos_sin_cache
    if table.dim() != 2 or table.shape[1] != rope.rotary_dim:
        return f"a rotary table of shape {tuple(table.shape)} where the model rotates {rope.rotary_dim}"
    if bool(module.is_neox_style) != (rope.pairing == "half"):
        return "another pairing of rotated dimensions"
    positions = torch.tensor(probe_positions(rope, end=table.shape[0]))
    expected = rotary_table(rope, positions)
    found = table[positions.to(table.device)].float().cpu()
    error = (found - torch.cat((expected.cos, expected.sin), dim=-1)).abs().amax(dim=-1)
    # The table's own rounding, and a frequency that is off in its last bit: 1e-7 of the position. At
    # position 0 the cosines are the attention factor itself.
    rounding = torch.finfo(table.dtype).eps * rope.attention_factor + 1e-4
    if not bool((error <= rounding + 2e-7 * positions).all()):
        because = served_otherwise(rope)
        return f"a rotary table that is {float(error.max()):.3f} off" + (f": {because}" if because else "")
    return None


def refused_weights(model: Any, path: Path, *, rank: int = 0, size: int = 1) -> str | None:
    """Why the weights in memory are not those of the files in `path`, or None.

    Compares rows of the embedding and of two projections of every layer, rounded to
    the model's dtype; names as in the checkpoint, which SGLang keeps for these. A
    tensor-parallel rank holds rows of the embedding and columns of the projections.
    """
    live = dict(model.named_parameters())
    names = ["model.embed_tokens.weight"]
    names += sorted(n for n in live if n.endswith(("self_attn.o_proj.weight", "mlp.down_proj.weight")))
    compared = 0
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(set(names) & set(tensors.keys())):
                found = live[name].data if name in live else None
                if found is None:
                    return f"no parameter {name}, which the files have"
                rows = _part(tensors.get_slice(name), name, found, rank, size)
                if found.shape[1:] != rows.shape[1:]:
                    return f"a parameter {name} of another shape than in the files"
                if not torch.equal(found[: len(rows)].cpu(), rows.to(found.dtype)):
                    return f"other weights in {name} than the files"
                compared += 1
    return None if compared >= 2 else "no weights that could be compared with the files"


def _part(file: Any, name: str, live: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The first rows, as far as this rank holds them."""
    if size == 1:
        rows: torch.Tensor = file[:_ROWS]
    elif "embed_tokens" in name:
        rows = file[rank * len(live) : rank * len(live) + _ROWS]  # none where it is all padding
    else:
        width = file.get_shape()[1] // size
        rows = file[:_ROWS, rank * width : (rank + 1) * width]
    return rows
