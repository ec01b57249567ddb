"""Load a model, its tokenizer and its identity in one step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvhub.errors import BadInput, Corrupt
from kvhub.model.finite import demand_finite
from kvhub.model.identify import describe, identify
from kvhub.model.identity import ModelIdentity
from kvhub.model.placement import Sharded, loading, place
from kvhub.model.quiet import quietly
from kvhub.model.resolve import resolve
from kvhub.model.tokenizer import load_tokenizer
from kvhub.strict_json import shown

__all__ = ["LoadedModel", "Sharded", "load_model", "resolve"]


@dataclass(frozen=True)
class LoadedModel:
    """A transformers causal LM in evaluation mode, and what it is."""

    model: Any
    tokenizer: Any
    identity: ModelIdentity
    path: Path


def load_model(
    ref: str | Path, dtype: torch.dtype | None = None, *, device: torch.device | str | Sharded = "cpu"
) -> LoadedModel:
    """Load `ref` (a directory or `org/name[@revision]`) with SDPA attention.

    dtype: None keeps the config's own. device: `sharded`, a `Sharded`, or a GPU that is too small for it
    spreads the weights with accelerate. Errors: those of `resolve`, `identify` and `demand_finite`; `Corrupt`
    where the weights cannot be read.
    """
    path = resolve(str(ref))
    describe(path)  # refuse by name before gigabytes are read
    demand_finite(path, dtype)
    tokenizer = load_tokenizer(path)
    spread = place(path, dtype, device)
    model = _weights(path, dtype, {} if spread is None else loading(spread))
    if spread is None:
        model = model.to(device)
    model = model.eval().requires_grad_(False)
    found = str(model.dtype).removeprefix("torch.")
    identity = identify(path, dtype=found, model=model, tokenizer=tokenizer)
    return LoadedModel(model, tokenizer, identity, path)


def _weights(path: Path, dtype: torch.dtype | None, options: dict[str, Any]) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        with quietly():
            model, report = AutoModelForCausalLM.from_pretrained(
                path,
                dtype="auto" if dtype is None else dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except SafetensorError as error:
        raise Corrupt(
            f"{path}: the weights cannot be read: {shown(error)}", "download the model again"
        ) from None
    except Exception as error:  # each file that transformers reads beside the weights raises its own kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{path} cannot be loaded: {shown(reason)}", "fetch the model again") from error
    # transformers only warns and leaves random numbers where a weight is absent.
    if missing := report["missing_keys"]:
        raise Corrupt(f"{path}: the weights have no {min(missing)}", "download the model again")
    return model
