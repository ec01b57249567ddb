"""SGLang on a machine without a GPU: the environment that its CPU engine needs.

For development and CI. It needs the package in `packaging/sglang_cpu`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""CUDA, ROCm, and CUDA under WSL: present where a driver is, without importing torch."""

MAX_TOTAL_TOKENS = 32768
"""Slots of the pool by default; without a limit SGLang takes 71 % of the memory."""


def wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the CPU engine is to be used: `SGLANG_USE_CPU_ENGINE`, else no GPU driver here."""
    chosen = environment.get("SGLANG_USE_CPU_ENGINE")
    if chosen is not None:
        return chosen.lower() in ("1", "true", "yes")
    return not any(Path(device).exists() for device in _GPU_DEVICES)


def variables(architectures: list[str]) -> dict[str, str]:
    """Environment of a server that serves one of `architectures` (names as in `config.json`)."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        # RoPE is torch.compile'd: the first request would wait seconds for a C++ compiler.
        "TORCHDYNAMO_DISABLE": "1",
        # Elsewhere than on a GPU the cos/sin table takes the model's dtype; transformers keeps float32.
        "SGLANG_ROPE_CACHE_FP32": "1",
        # Several processes share few cores, and spinning threads starve the others.
        "OMP_NUM_THREADS": "1",
        "GOMP_SPINCOUNT": "0",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_other_model_files(architectures)),
    }


def flags(given: Sequence[str]) -> list[str]:
    """Flags that a server on the CPU needs and `given` does not hold already."""
    added = [] if "--sleep-on-idle" in given else ["--sleep-on-idle"]
    if not has_flag(given, "--max-total-tokens"):
        added += ["--max-total-tokens", str(MAX_TOTAL_TOKENS)]
    return added


def has_flag(given: Sequence[str], name: str) -> bool:
    """Whether `--name value` or `--name=value` was given."""
    return any(flag == name or flag.startswith(f"{name}=") for flag in given)


def _other_model_files(architectures: list[str]) -> list[str]:
    """SGLang's model files that do not name an architecture: importing them all costs seconds a start."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return []
    folder = Path(spec.submodule_search_locations[0], "srt", "models")
    unused = []
    for file in sorted(folder.glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="replace")
        if not file.stem.startswith("_") and not any(name in source for name in architectures):
            unused.append(file.stem)
    return unused
