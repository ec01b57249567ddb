"""Where a model's weights go: one device, or several, the processor's memory and the disk (accelerate)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvhub.errors import BadInput, NotFound
from kvhub.model.config import read_config
from kvhub.model.fingerprint import weight_files, weight_headers

SPARE = 1.1
"""A model is put on one GPU where that has so many times its weights free: forwards need some too."""


@dataclass(frozen=True)
class Sharded:
    """Weights spread by accelerate, GPUs first, then memory, then disk. The numbers computed are the same.

    max_memory: bytes for each GPU (by index) and for `cpu`; None: what accelerate finds free.
    offload: a directory for what fits nowhere else; None: transformers reads it from the model's own files.
    """

    max_memory: Mapping[int | str, int] | None = None
    offload: Path | None = None


def place(path: Path, dtype: torch.dtype | None, device: torch.device | str | Sharded) -> Sharded | None:
    """How to spread the weights in `path`; None: all on `device`.

    `sharded` and CUDA devices that are too small spread it. Errors: `NotFound` without accelerate.
    """
    if isinstance(device, Sharded):
        found: Sharded | None = device
    elif device == "sharded":
        found = Sharded()
    else:
        found = None if _fits(path, dtype, torch.device(device)) else Sharded()
    if found is not None:
        _demand_accelerate()
    return found


def loading(sharded: Sharded) -> dict[str, Any]:
    """The arguments of `from_pretrained`."""
    options: dict[str, Any] = {"device_map": "auto"}
    if sharded.max_memory is not None:
        if any(size < 0 for size in sharded.max_memory.values()):
            raise BadInput("bytes of a device cannot be negative")
        options["max_memory"] = dict(sharded.max_memory)
    if sharded.offload is not None:
        options["offload_folder"] = str(sharded.offload)
    return options


def input_device(model: Any) -> torch.device:
    """Where token ids go, and where captures are gathered: the device that computes the first layer.

    An offloaded model's parameters are on `meta`, which is no place for either.
    """
    spread: dict[str, Any] | None = getattr(model, "hf_device_map", None)
    if not spread:
        return torch.device(model.device)
    first = next((device for device in spread.values() if device not in ("cpu", "disk")), "cpu")
    return _device(first)


def layer_device(model: Any, layer: int) -> torch.device:
    """Where `layer` is computed, which is where its rows of a cache must be.

    What lies in memory or on disk is computed on the first GPU, if there is one.
    """
    spread: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    name = f"model.layers.{layer}"
    whole = (part for part in spread if part == name or name.startswith(f"{part}.") or part == "")
    device = spread.get(max(whole, key=len, default=""), "cpu")
    return input_device(model) if device in ("cpu", "disk") else _device(device)


def weight_bytes(path: Path, dtype: torch.dtype | None) -> int:
    """What the weights in `path` take in memory, by the headers of its files.

    dtype: None is the config's own, or each tensor's where the config names none.
    Errors: those of `read_config`, `weight_files` and `read_header`.
    """
    if dtype is None:
        named = getattr(read_config(path).config, "dtype", None)
        dtype = named if isinstance(named, torch.dtype) else None
    headers = weight_headers(weight_files(path)).values()
    if dtype is None:
        return sum(tensor.end - tensor.start for tensor in headers)
    return sum(math.prod(tensor.shape) for tensor in headers) * dtype.itemsize


def _device(place: int | str | torch.device) -> torch.device:
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)


def _fits(path: Path, dtype: torch.dtype | None, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return SPARE * weight_bytes(path, dtype) <= torch.cuda.mem_get_info(device)[0]


def _demand_accelerate() -> None:
    try:
        import accelerate  # type: ignore[import-untyped]  # noqa: F401
    except ImportError:
        raise NotFound(
            "the model does not fit on one device, and accelerate is not installed",
            "pip install accelerate, or use --device cpu",
        ) from None
