"""The weights of a model's k_norm, from its files: the model need not be loaded, nor lie in one place."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from kvhub.errors import Corrupt, Incompatible
from kvhub.model.fingerprint import weight_files
from kvhub.model.headers import read_header
from kvhub.model.identity import ModelIdentity
from kvhub.strict_json import shown

_NAME = re.compile(r"^(?:model\.)?layers\.(\d+)\.self_attn\.k_norm\.weight$")


def k_norm_weights(path: Path, identity: ModelIdentity) -> Tensor:
    """`[num_layers, head_dim]` float32, rounded to the dtype that the model runs in. path: its directory.

    Errors: `Incompatible(code="k_norm")` where the model has no k_norm, or not one weight a dimension of a
    head in every layer; `Corrupt`, `NotFound`.
    """
    from safetensors import SafetensorError, safe_open

    shape = identity.geometry
    demand_k_norm(identity)
    found: dict[int, Tensor] = {}
    for file in weight_files(path):
        names = {int(match[1]): name for name in read_header(file) if (match := _NAME.match(name))}
        try:
            with safe_open(file, framework="pt") as tensors:
                for layer, name in names.items():
                    found[layer] = tensors.get_tensor(name).to(getattr(torch, identity.dtype)).float().clone()
        except (SafetensorError, OSError) as error:
            raise Corrupt(f"{file.name} cannot be read: {shown(error)}") from None
    weights = [found.get(layer, torch.empty(0)) for layer in range(shape.num_layers)]
    if any(weight.shape != (shape.head_dim,) for weight in weights):
        raise Incompatible(
            f"{identity.name} has no k_norm of one weight a dimension of a head in every layer",
            "use --normalise-keys auto or off",
            code="k_norm",
        )
    return torch.stack(weights)


def demand_k_norm(identity: ModelIdentity) -> None:
    """Refuse (`Incompatible`) a model whose keys go through no norm."""
    if not identity.geometry.k_norm:
        raise Incompatible(
            f"{identity.name} has no k_norm to normalise mapped keys with",
            "use --normalise-keys auto or off",
            code="k_norm",
        )
