"""Captures kept on disk: one file for each model and window, reused by every later fit or study.

    DIR/<digest of the model's identity>/<sha256 of the token ids>.safetensors

`keys` and `values`, each `[layers, tokens, num_kv_heads, head_dim]`, as the model caches them and in its
dtype. Content keys are computed from them when they are read, so they are those of a live capture.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvhub.errors import BadInput, Corrupt, KvhubError
from kvhub.files import writing
from kvhub.fit.capture import Capture
from kvhub.fit.store import raw_bytes, sweep, write_bytes, write_tensors
from kvhub.fit.text import token_digest
from kvhub.model.identity import ModelIdentity, canonical_json
from kvhub.model.rope import rotary_table
from kvhub.strict_json import shown
from kvhub_kernels.rotary import strip_rope

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


class CaptureStore:
    """The captures of one model in one directory."""

    def __init__(self, root: Path, identity: ModelIdentity) -> None:
        self.identity = identity
        self.directory = root / identity.digest

    def prepare(self) -> None:
        """Make the directory. Errors: `AccessDenied`, `KvhubError`."""
        with writing(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            sweep(self.directory)
        described = self.directory / "model.json"
        if not described.exists():
            write_bytes(described, canonical_json(self.identity.model_dump(mode="json")) + b"\n")

    def bytes_missing(self, windows: Iterable[Tensor]) -> int:
        """Bytes that the captures of `windows` will take, beside those that are there."""
        each = self.identity.geometry.bytes_per_token(_ITEMSIZE[self.identity.dtype])
        return sum(len(window) * each for window in windows if not self.path(window).exists())

    def path(self, window: Tensor) -> Path:
        """Where the capture of `window` (`[tokens]` int64) is."""
        return self.directory / f"{token_digest([window[None]])}.safetensors"

    def put(self, window: Tensor, capture: Capture) -> None:
        """Keep a capture; written whole or not at all."""
        tensors = {"keys": torch.stack(capture.keys).cpu(), "values": torch.stack(capture.values).cpu()}
        about = {"model": self.identity.digest, "checksum": _checksum(tensors["keys"], tensors["values"])}
        write_tensors(self.path(window), tensors, about)

    def get(self, window: Tensor) -> Capture | None:
        """The capture of `window`; None where there is none or it is damaged.

        Errors: `BadInput` where a directory has its name: it could not be made again.
        """
        path = self.path(window)
        if path.is_dir():
            raise BadInput(f"{path} is a directory, not a capture", "remove it, or give another --captures")
        shape = self.identity.geometry
        expected = (shape.num_layers, len(window), shape.num_kv_heads, shape.head_dim)
        try:
            with safe_open(path, framework="pt") as file:
                if (file.metadata() or {}).get("model") != self.identity.digest:
                    return None
                # Copies: a file that is cut short under a mapping would end the process.
                keys, values = (file.get_tensor(name).clone() for name in ("keys", "values"))
                checksum = file.metadata().get("checksum")
        except (SafetensorError, OSError, RuntimeError):
            return None
        dtype = getattr(torch, self.identity.dtype)
        if any(tuple(t.shape) != expected or t.dtype != dtype for t in (keys, values)):
            return None
        if _checksum(keys, values) != checksum:
            return None
        table = rotary_table(self.identity.rope, torch.arange(len(window)))
        content = [strip_rope(key.to(torch.float32), table) for key in keys]
        return Capture(content, list(keys), list(values))

    def rows(self, window: Tensor, positions: range, layers: list[int]) -> tuple[Tensor, Tensor]:
        """Content keys and values of some layers side by side, as `Capture.rows`; nothing else is read.

        The capture is not verified again. Errors: `Corrupt` where it is gone or cannot be read.
        """
        shape = self.identity.geometry
        chosen = slice(positions.start, positions.stop, positions.step)
        table = rotary_table(self.identity.rope, torch.arange(len(window))[chosen])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        try:
            with safe_open(self.path(window), framework="pt") as file:
                parts = file.get_slice("keys"), file.get_slice("values")
                for layer in layers:
                    key, value = (part[layer : layer + 1][0][chosen] for part in parts)
                    keys.append(strip_rope(key.to(torch.float32), table).flatten(1).to(torch.float64))
                    values.append(value.flatten(1).to(torch.float64))
        except (SafetensorError, OSError, RuntimeError) as error:
            raise Corrupt(f"a capture in {self.directory} cannot be read: {shown(error)}") from None
        empty = torch.empty(len(positions), 0, dtype=torch.float64)
        for rows in (*keys, *values):
            if rows.shape != (len(positions), shape.features):
                raise Corrupt(f"a capture in {self.directory} is another model's")
        return torch.cat([empty, *keys], dim=1), torch.cat([empty, *values], dim=1)


def demand_disk(stores: Iterable[CaptureStore], windows: list[Tensor]) -> None:
    """Refuse (`KvhubError`) before any forward where the captures do not fit on the disk."""
    needed: dict[Path, int] = {}
    for store in stores:
        place = store.directory.absolute()
        existing = next(parent for parent in (place, *place.parents) if parent.exists())
        root = place.parent
        needed[root] = needed.get(root, 0) + store.bytes_missing(windows)
        free = shutil.disk_usage(existing).free
        if needed[root] > free:
            raise KvhubError(
                f"the captures take {needed[root] / 1e9:.3g} GB and {root} has {free / 1e9:.3g} GB free",
                "free some space, choose another --captures, or give fewer --sequences",
            )


def _checksum(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(raw_bytes(tensor.contiguous()))
    return digest.hexdigest()
