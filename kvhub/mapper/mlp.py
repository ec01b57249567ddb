"""The `mlp` family: a perceptron of two hidden layers per target layer (arXiv 2608.03893, section 4.4).

Rows as in the ridge family: content keys (RoPE removed) or values of the selected source layers side by
side, to the target's content keys or values.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvhub.artifact.tensors import MLP_PARTS, expected_tensors
from kvhub.errors import Corrupt
from kvhub.mapper.base import Mapper, SourceRows
from kvhub_kernels.mlp import Dense, apply_perceptron
from kvhub_kernels.resident import Resident
from kvhub_kernels.rotary import apply_rope
from kvhub_kernels.rows import Rows

if TYPE_CHECKING:
    from kvhub.artifact.manifest import Manifest


class MlpMapper(Mapper):
    """Computes in float32 unless `to(dtype=...)` says otherwise; biases and sums stay float32."""

    def __init__(
        self,
        manifest: Manifest,
        tensors: Mapping[str, Tensor],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """tensors: exactly `expected_tensors(manifest)`. Errors: `Corrupt`."""
        super().__init__(manifest)
        for name, shape in expected_tensors(manifest).items():
            if name not in tensors or tuple(tensors[name].shape) != shape:
                raise Corrupt(f"tensor {name!r} is missing or not {list(shape)}")
        self.device = torch.device(device)
        self.dtype = dtype
        self._tensors = {
            name: tensor.to(self.device, torch.float32 if name.endswith("bias") else dtype)
            for name, tensor in tensors.items()
        }
        self._resident: Resident | None = None
        self._token = object()  # two mappers may hold the same artifact
        self._kept: set[tuple[object, torch.device, torch.dtype]] = set()
        self._placed: dict[tuple[torch.device, torch.dtype], MlpMapper] = {}
        self._placing = threading.Lock()

    def layers(self, target_layer: int, side: str) -> list[Dense]:
        """The dense layers of `side` (`k` or `v`) of one target layer, from the input on."""
        prefix = f"layers.{target_layer}.{side}"
        return [
            Dense(self._tensors[f"{prefix}.{part}weight"], self._tensors[f"{prefix}.{part}bias"])
            for part in MLP_PARTS
        ]

    def map_layer(self, target_layer: int, source: SourceRows) -> tuple[Tensor, Tensor]:
        """See `Mapper.map_layer`."""
        chosen = self.manifest.source_layers[target_layer]
        content = self._apply(target_layer, "k", [source.content_keys(layer, self.dtype) for layer in chosen])
        values = self._apply(target_layer, "v", [source.values(layer).to(self.dtype) for layer in chosen])
        return apply_rope(content, source.table(self.manifest.target.rope)), values

    def map_rows(self, source: SourceRows, target: Rows) -> Tensor:
        """See `Mapper.map_rows`; on a GPU the weights are moved there once."""
        placed = self._on(target.device, target.dtype)
        if placed is not self:
            return placed.map_rows(source, target)
        with torch.no_grad():
            return super().map_rows(source, target)

    def prepare(self, device: torch.device | str, dtype: torch.dtype) -> None:
        """See `Mapper.prepare`: the weights on the device."""
        self._on(torch.device(device), dtype)

    def hold(self, device: torch.device | str, dtype: torch.dtype) -> object | None:
        """See `Mapper.hold`."""
        device = torch.device(device)
        if self._resident is None or device.type == self.device.type:
            return self
        return self._resident.find((self._token, device, _products(dtype)))

    def keep_in(self, resident: Resident) -> None:
        """See `Mapper.keep_in`. What lies where the caches are needs nothing made, and is not counted."""
        with self._placing:
            self._resident = resident
            self._placed.clear()

    def let_go(self) -> None:
        """See `Mapper.let_go`."""
        with self._placing:
            self._placed.clear()
        for key in self._kept:
            if self._resident is not None:
                self._resident.drop(key)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> MlpMapper:
        """A copy on `device` computing in `dtype` (None: as now)."""
        return MlpMapper(self.manifest, self._tensors, device=device, dtype=dtype or self.dtype)

    def _on(self, device: torch.device, cached: torch.dtype) -> MlpMapper:
        """This mapper where the cache is; on CUDA in bfloat16 unless the cache is float32."""
        if device.type == self.device.type:
            return self
        dtype = _products(cached)
        if self._resident is not None:
            size = sum(
                one.numel() * (one.dtype if name.endswith("bias") else dtype).itemsize
                for name, one in self._tensors.items()
            )
            key = (self._token, device, dtype)
            self._kept.add(key)
            ready: MlpMapper = self._resident.get(key, size, lambda: self.to(device, dtype))
            return ready
        with self._placing:
            known = self._placed.get((device, dtype))
            if known is None:
                known = self._placed[device, dtype] = self.to(device, dtype)
            return known

    def _apply(self, target_layer: int, side: str, rows: list[Tensor]) -> Tensor:
        """rows: k tensors `[tokens, H_s, D_s]` -> `[tokens, H_t, D_t]` in the compute dtype."""
        geometry = self.manifest.target.geometry
        inputs = grouped(rows, local=self.manifest.support == "head-local")
        layers = self.layers(target_layer, side)
        inputs = inputs.expand(len(layers[0].weight), -1, -1)
        out = apply_perceptron(inputs, layers).transpose(0, 1).flatten(1)
        return out.view(-1, geometry.num_kv_heads, geometry.head_dim).to(self.dtype)


def _products(cached: torch.dtype) -> torch.dtype:
    return torch.float32 if cached == torch.float32 else torch.bfloat16


def grouped(rows: list[Tensor], *, local: bool) -> Tensor:
    """Source rows `[tokens, H_s, D_s]` of k layers as inputs: `[1, tokens, k * H_s * D_s]`, or with `local`
    one group a head, `[H_s, tokens, k * D_s]`.
    """
    if local:
        return torch.cat(rows, dim=-1).transpose(0, 1)
    return torch.cat([row.flatten(1) for row in rows], dim=-1)[None]
