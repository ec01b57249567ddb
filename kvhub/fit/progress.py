"""The names under which a fit keeps its progress, without torch: for whoever lists or removes it."""

from __future__ import annotations

import re

FITS = "fits"
"""Folder of `Settings.cache` with one directory a fit that has not finished."""
STATE = "state.json"
LOCK = "lock"
"""Held (flock) while a fit runs."""

_KEY = re.compile(r"[0-9a-f]{32}")


def is_key(name: str) -> bool:
    """Whether a directory is called as the default checkpoint of a fit is."""
    return bool(_KEY.fullmatch(name))


def is_progress(name: str) -> bool:
    """Whether something in a checkpoint is called as kvhub calls it."""
    moments = name.startswith("moments-") and name.endswith(".safetensors") and name[8:-12].isdigit()
    training = name in ("training-1.safetensors", "training-2.safetensors")
    return moments or training or name in (LOCK, STATE, "captures") or name.startswith(".writing-")
